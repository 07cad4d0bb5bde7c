"""Question 4: is a payload always there before its flag, in both directions?

A round: the device fills a payload with the round's number, copies it out and signals; the worker
compares every word, fills the answer and stores the flag; the device waits and compares every word,
in odd rounds straight from host memory, in even ones from a copy. All on one stream, with eight
rounds under way. Two rounds carry a planted mistake on each side, so that a blind check shows.
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gpu_checks import layout
from gpu_checks.figures import Figures
from gpu_checks.kernels import Count, make_count
from gpu_checks.rig import Rig, use_rig

LAG = layout.X_SLOTS // 2
PLANTED = (7, 10)  # one odd, one even
_NUM_PER_LOOK = 2000
_RESERVE_S = 6.0  # to come to the end and close
_LOOK_S = 10.0


def ordering(kind: str, limit_s: float, figures: Figures) -> None:
    """As many rounds as wanted, or as fit into the time."""
    use_rig(kind, limit_s, lambda rig: _ordering_with(rig, figures))


def _ordering_with(rig: Rig, figures: Figures) -> None:
    # Planted on the worker's side, too.
    rig.start_peer("check", num_rounds=rig.sizes.num_ordering_rounds, planted=PLANTED)
    figures.put("worker_words", rig.peer_words)
    figures.put("rounds_wanted", rig.sizes.num_ordering_rounds)
    rounds = _Rounds(rig)
    start_s = time.monotonic()
    next_put_s = start_s + _LOOK_S
    while rounds.num_done < rig.sizes.num_ordering_rounds and rig.left_s() > _RESERVE_S:
        rounds.run(min(_NUM_PER_LOOK, rig.sizes.num_ordering_rounds - rounds.num_done))
        if time.monotonic() > next_put_s:
            figures.put("so_far", rounds.found())
            next_put_s += _LOOK_S
    rounds.finish()
    elapsed_s = time.monotonic() - start_s
    figures.put("so_far", rounds.found())
    figures.put("us_per_round", round(elapsed_s / max(rounds.num_done, 1) * 1e6, 2))


@dataclass(slots=True)
class _Views:
    """One slot's payloads by size: what is copied out, and what comes back."""

    x: dict[int, torch.Tensor] = field(default_factory=dict)
    y: dict[int, torch.Tensor] = field(default_factory=dict)


class _Rounds:
    """Enqueues rounds and counts what was wrong."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._count: Count = make_count(rig)
        stride = layout.slot_bytes(is_tiny=rig.is_tiny)
        y_offset = layout.y_offset(is_tiny=rig.is_tiny)
        sizes = {layout.payload_bytes(s, is_tiny=rig.is_tiny) for s in range(1, 1001)}
        self._slots = [_Views() for _ in range(layout.X_SLOTS)]
        for index, slot in enumerate(self._slots):
            for size in sizes:
                slot.x[size] = rig.host(layout.X_OFFSET + index * stride, size // 4)
                slot.y[size] = rig.host(y_offset + index * stride, size // 4)
        self._out = {size: rig.zeros(size // 4) for size in sizes}
        self._in = {size: rig.zeros(size // 4) for size in sizes}
        self._errors = {"zero-copy": rig.zeros(1), "copy": rig.zeros(1)}
        self._ready, self._done = rig.word(layout.READY), rig.word(layout.DONE)
        self._num_checked = 0
        self._num_bytes = 0
        self.num_done = 0
        # Every variant once, before a wait is outstanding: a kernel's first launch may hang then.
        warm = rig.zeros(1)
        for size in sizes:
            rig.launch(rig.transfer, partial(self._count, self._slots[0].y[size], 0, warm))
            rig.launch(rig.transfer, partial(self._count, self._in[size], 0, warm))
            rig.launch(rig.transfer, partial(_fill, self._out[size], 1))
        rig.synchronize()

    def run(self, num_rounds: int) -> None:
        """Enqueue rounds; the launch queue holds the caller back when it is full."""
        for sequence in range(self.num_done + 1, self.num_done + num_rounds + 1):
            self._send(sequence)
            if sequence > LAG:
                self._receive(sequence - LAG)
        self.num_done += num_rounds

    def finish(self) -> None:
        """Receive what is under way, and wait."""
        for sequence in range(self._num_checked + 1, self.num_done + 1):
            self._receive(sequence)
        self._rig.device.synchronize(timeout_s=_RESERVE_S - 1)

    def found(self) -> dict[str, Any]:
        """Wrong words by way, and those that had to be; waits for what is enqueued."""
        self._rig.device.synchronize(timeout_s=_RESERVE_S - 1)
        is_tiny = self._rig.is_tiny
        planted = [s for s in PLANTED if s <= self._num_checked]
        words = {s: layout.payload_bytes(s, is_tiny=is_tiny) // 4 for s in planted}
        return {
            "rounds": self._num_checked,
            "gib_each_way": round(self._num_bytes / 2**30, 3),
            "to_worker": {
                "wrong_words": self._rig.load(layout.ERRORS), "planted": sum(words.values())
            },
            "to_device_zero_copy": {
                "wrong_words": int(self._errors["zero-copy"].item()),
                "planted": sum(n for s, n in words.items() if s % 2),
            },
            "to_device_by_copy": {
                "wrong_words": int(self._errors["copy"].item()),
                "planted": sum(n for s, n in words.items() if s % 2 == 0),
            },
        }  # fmt: skip

    def _send(self, sequence: int) -> None:
        rig, size = self._rig, layout.payload_bytes(sequence, is_tiny=self._rig.is_tiny)
        out, value = self._out[size], sequence + (sequence in PLANTED)
        rig.device.launch(rig.transfer, lambda: _fill(out, value))
        rig.device.copy(rig.transfer, self._slots[sequence % layout.X_SLOTS].x[size], out)
        rig.device.signal(rig.transfer, self._ready, sequence)
        self._num_bytes += size

    def _receive(self, sequence: int) -> None:
        rig, size = self._rig, layout.payload_bytes(sequence, is_tiny=self._rig.is_tiny)
        rig.device.wait(rig.transfer, self._done, sequence)
        values = self._slots[sequence % layout.X_SLOTS].y[size]
        errors = self._errors["zero-copy"]
        if sequence % 2 == 0:
            rig.device.copy(rig.transfer, self._in[size], values)
            values, errors = self._in[size], self._errors["copy"]
        rig.device.launch(rig.transfer, lambda: self._count(values, sequence, errors))
        self._num_checked = sequence


def _fill(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)
