"""Question 3: how long from a signal of the device to a worker and back?

The worker notes when it saw each signal. A batch of rounds is enqueued behind a gate and let go at
once, so that the time between two signals is the round trip and not what enqueueing takes.
"""

import time
from typing import Any

import numpy as np
import torch

from gpu_checks import layout
from gpu_checks.figures import Figures, percentiles
from gpu_checks.rig import Rig, use_rig


def round_trips(kind: str, limit_s: float, figures: Figures) -> None:
    """Without load, and beside copies to the device that keep the link busy."""
    use_rig(kind, limit_s, lambda rig: _round_trips_with(rig, figures))


def _round_trips_with(rig: Rig, figures: Figures) -> None:
    for is_loaded in (False, True):
        name = "beside copies to the device" if is_loaded else "on an idle link"
        figures.put(name, _measure(rig, is_loaded=is_loaded))
        figures.put("worker_words", rig.peer_words)
        rig.stop_peers()


def _measure(rig: Rig, *, is_loaded: bool) -> dict[str, Any]:
    sizes = rig.sizes
    total = sizes.num_batches * sizes.batch_rounds
    assert 2 * total <= layout.MAX_STAMPS
    load = _Load(rig) if is_loaded else None
    rig.start_peer("echo", num_rounds=total)
    gate = rig.word(layout.GATE)
    enqueue_us = []
    for batch in range(sizes.num_batches):
        rig.device.wait(rig.transfer, gate, batch + 1)
        start_s = time.perf_counter()
        _enqueue(rig, batch * sizes.batch_rounds)
        enqueue_us.append((time.perf_counter() - start_s) * 1e6 / (2 * sizes.batch_rounds))
        if load is not None:
            load.start()
        rig.store(layout.GATE, batch + 1)
        rig.synchronize(rig.transfer)
        if load is not None:
            load.finish()
    stamps = rig.segment.view(np.int64, layout.STAMPS_OFFSET, 2 * total).reshape(-1, 2).copy()
    seen = stamps[:, 0].reshape(sizes.num_batches, sizes.batch_rounds)
    found: dict[str, Any] = {
        "round_trip_us": percentiles((np.diff(seen, axis=1) / 1e3).ravel().tolist()),
        "of_which_worker_us": percentiles(((stamps[:, 1] - stamps[:, 0]) / 1e3).tolist()),
        "enqueue_us_per_operation": round(float(np.median(enqueue_us)), 2),
    }
    if load is not None:
        found["batches_loaded_to_their_end"] = load.num_outlasting
        found["num_batches"] = sizes.num_batches
    return found


def _enqueue(rig: Rig, first: int) -> None:
    ready, done = rig.word(layout.READY), rig.word(layout.DONE)
    for sequence in range(first + 1, first + rig.sizes.batch_rounds + 1):
        rig.device.signal(rig.transfer, ready, sequence)
        rig.device.wait(rig.transfer, done, sequence)


class _Load:
    """Copies to the device on a stream of their own, for longer than a batch takes."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        num_bytes = rig.sizes.load_chunk_bytes
        self._source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not rig.is_tiny)
        self._destination = rig.zeros(num_bytes // 4).view(torch.uint8)
        self.num_outlasting = 0

    def start(self) -> None:
        self._event = self._rig.device.event()
        for _ in range(self._rig.sizes.num_load_chunks):
            self._rig.device.copy(self._rig.load_stream, self._destination, self._source)
        self._rig.device.record(self._rig.load_stream, self._event)

    def finish(self) -> None:
        """Note whether it lasted to the end of the batch, and wait for it."""
        self.num_outlasting += not self._rig.device.is_done(self._event)
        self._rig.synchronize(self._rig.load_stream)
        self._rig.device.release_event(self._event)
