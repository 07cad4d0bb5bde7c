"""Questions about streams, words and shared memory: which ``--device-sync`` is right, at what cost?

``stream``: memory is registered with the driver; streams copy, signal and wait by themselves.
``host``: buffers are pinned; the engine's threads signal and wait.
"""

import gc
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ...runtime.config.environment import MAX_CONNECTIONS
from ...runtime.errors import ConfigError
from ..device.base import DeviceError, Stream
from ..device.cuda_driver import load_driver
from .peer import DONE, GATE, LAG, MAX_STAMPS, NUM_SLOTS, PAYLOADS, PLANTED, READY, STAMPS, WRONG
from .questions import Findings, rounded
from .rig import Count, Rig, fill

_UPLOAD_BYTES = (1 << 10, 64 << 10, 2 << 20)
_MAX_LAUNCHES = 8192


def answer(name: str, kind: str, limit_s: float, figures: Findings) -> None:
    """Answer one question. A way that does not work at all is an answer, too."""
    try:
        rig = Rig(kind, limit_s)
    except ConfigError as error:
        figures.put("refused", str(error))
        return
    try:
        _WORKS[name](rig, figures)
    except BaseException:
        rig.stop_peer()  # and no more: the process ends next
        rig.device.release_waits()
        raise
    gc.collect()  # the tensors of the work, which hold the memory
    rig.close()


def shared_memory(rig: Rig, figures: Findings) -> None:
    """Does each side read what the other wrote after the mapping, and are copies asynchronous?"""
    num_bytes = rig.sizes.copy_bytes
    figures.put("register_ms_per_gib", rounded(rig.register_s * 1e3 * 2**30 / rig.segment.num_bytes))
    host, on_device, count = rig.host(num_bytes), rig.zeros(num_bytes), Count(rig, num_bytes)
    wrong_on_host = 0
    # Its last round is a planted mistake, which both sides must find.
    for number in range(1, rig.sizes.num_rewrites + 2):
        is_planted = number > rig.sizes.num_rewrites
        host.fill_(number)
        rig.device.copy(rig.main, on_device, host)
        count.enqueue(on_device, number + is_planted)
        rig.fill(on_device, -number)
        rig.device.copy(rig.main, host, on_device)
        rig.synchronize()
        wrong_on_host += int((host != -number - is_planted).sum())
    found = {"to_device": count.total(), "to_host": wrong_on_host}
    planted = num_bytes // 4
    figures.put("wrong", {way: {"words": n, "planted": planted} for way, n in found.items()})
    rig.device.wait(rig.main, rig.word(GATE), 1)
    start_s, event = time.perf_counter(), rig.device.event()
    rig.device.copy(rig.main, on_device, host)
    figures.put("copy_call_us", rounded((time.perf_counter() - start_s) * 1e6))
    rig.device.record(rig.main, event)
    figures.put("copy_was_queued", not rig.device.is_done(event))
    rig.store(GATE, 1)


def round_trips(rig: Rig, figures: Findings) -> None:
    """How long from a signal to a process and back? The peer polls from Python, and notes when.

    Rounds are enqueued behind a gate and released at once, so the time between two signals is the
    round trip without enqueuing. Where waits block the caller, it is both.
    """
    sizes = rig.sizes
    total = sizes.num_batches * sizes.batch_rounds
    assert total <= MAX_STAMPS
    rig.start_peer("echo", num_rounds=total)
    ready, done = rig.word(READY), rig.word(DONE)
    enqueue_us = []
    for batch in range(sizes.num_batches):
        if rig.holds_caller:
            rig.store(GATE, batch + 1)
        rig.device.wait(rig.main, rig.word(GATE), batch + 1)
        start_s = time.perf_counter()
        for sequence in range(batch * sizes.batch_rounds + 1, (batch + 1) * sizes.batch_rounds + 1):
            rig.device.signal(rig.main, ready, sequence)
            rig.device.wait(rig.main, done, sequence)
        enqueue_us.append((time.perf_counter() - start_s) * 1e6 / sizes.batch_rounds)
        rig.store(GATE, batch + 1)
        rig.synchronize()
    seen_us = rig.segment.view(np.int64, STAMPS, total).copy() / 1e3
    trips_us = np.diff(seen_us.reshape(sizes.num_batches, sizes.batch_rounds), axis=1).ravel()
    figures.put("round_trip_us", _percentiles(trips_us))
    figures.put("enqueue_us_per_round", rounded(statistics.median(enqueue_us)))


def streams(rig: Rig, figures: Findings) -> None:
    """Which streams stand still while one waits? The peer ends the wait, so nothing hangs."""
    figures.put(MAX_CONNECTIONS, os.environ.get(MAX_CONNECTIONS))
    num_bytes = 4096
    host, on_device = rig.host(num_bytes), [rig.zeros(num_bytes) for _ in rig.others]

    def enqueue(stream: Stream, tensor: torch.Tensor) -> None:
        rig.device.copy(stream, tensor, host)
        rig.device.launch(stream, lambda: fill(tensor, 1))
        rig.device.copy(stream, host, tensor)

    for stream, tensor in zip(rig.others, on_device, strict=True):
        enqueue(stream, tensor)  # a kernel's first launch may wait for the whole device
    rig.synchronize()
    rig.start_peer("release", hold_s=rig.sizes.hold_s)
    rig.device.wait(rig.main, rig.word(DONE), 1)
    rig.store(READY, 1)
    events, start_s = [rig.device.event() for _ in rig.others], time.perf_counter()
    for stream, tensor, event in zip(rig.others, on_device, events, strict=True):
        enqueue(stream, tensor)
        rig.device.record(stream, event)
    figures.put("enqueue_ms", rounded((time.perf_counter() - start_s) * 1e3))
    went_on: list[bool] = []
    while not went_on or not all(went_on):
        seen = [rig.device.is_done(event) for event in events]
        if rig.load(DONE) != 0:  # what is done now may have waited for that
            break
        went_on = seen
        time.sleep(1e-3)
    went_on = went_on or [False] * len(events)
    figures.put("num_streams", len(events))
    held_up = [s.name for s, is_done in zip(rig.others, went_on, strict=True) if not is_done]
    figures.put("held_up", held_up)


def link(rig: Rig, figures: Findings) -> None:
    """Bytes per second between registered memory and the device, over transfers of a GiB."""
    host, on_device = rig.host(rig.sizes.copy_bytes), rig.zeros(rig.sizes.copy_bytes)
    num_bytes = rig.sizes.copy_bytes * rig.sizes.num_copies
    ways = {"to_device": (on_device, host), "to_host": (host, on_device)}
    for name, (to, source) in ways.items():
        samples = []
        for _ in range(4):
            event, start_s = rig.device.event(), time.perf_counter()
            for _ in range(rig.sizes.num_copies):
                rig.device.copy(rig.main, to, source)
            rig.device.record(rig.main, event)
            while not rig.device.is_done(event):
                pass  # a sleep would be part of what is measured
            samples.append(time.perf_counter() - start_s)
        figures.put(f"{name}_gb_per_s", rounded(num_bytes / statistics.median(samples[1:]) / 1e9))


def order(rig: Rig, figures: Findings) -> None:
    """Is a payload always there before its flag, in both directions?

    A round: the device fills a payload with the round's number, copies it out and signals; the
    peer looks at every word, fills the answer and stores the flag; the device waits, copies it in
    and looks at every word. All on one stream, some rounds under way at once.
    """
    rounds = _Rounds(rig)
    rig.start_peer("answer", num_rounds=rig.sizes.num_rounds)
    figures.put("rounds_wanted", rig.sizes.num_rounds)
    start_s = time.monotonic()
    while rounds.num_sent < rig.sizes.num_rounds and rig.left_s() > 0:
        rounds.run(min(2000, rig.sizes.num_rounds - rounds.num_sent))
    rounds.finish()
    figures.put("rounds", rounds.num_sent)
    figures.put("us_per_round", rounded((time.monotonic() - start_s) / rounds.num_sent * 1e6))
    figures.put("wrong", rounds.wrong())


def uploads(rig: Rig, figures: Findings) -> None:
    """Do copies of memory that is not pinned return while their stream is held? How many launches do?"""
    for num_bytes in _UPLOAD_BYTES:
        source, target = torch.ones(num_bytes, dtype=torch.uint8), rig.zeros(num_bytes).view(torch.uint8)
        with _held(rig):
            start_s = time.perf_counter()
            rig.device.launch(rig.main, lambda: _copy(target, source))  # noqa: B023 - called at once
            took_s = time.perf_counter() - start_s
            is_queued = rig.load(DONE) == 0
        figures.put(f"upload of {num_bytes} bytes", {"ms": rounded(took_s * 1e3), "was_queued": is_queued})
    tensor, number, took_s = rig.zeros(4), 0, 0.0
    with _held(rig):
        while rig.load(DONE) == 0 and number < _MAX_LAUNCHES:
            start_s = time.perf_counter()
            rig.fill(tensor, 1)
            took_s = max(took_s, time.perf_counter() - start_s)
            number += 1
    figures.put("launches_while_held", number)
    figures.put("longest_launch_ms", rounded(took_s * 1e3))


@contextmanager
def _held(rig: Rig) -> Iterator[None]:
    """Hold the main stream inside the block, until a peer releases it after ``hold_s``."""
    rig.start_peer("release", hold_s=rig.sizes.hold_s)
    rig.device.wait(rig.main, rig.word(DONE), 1)
    rig.store(READY, 1)
    yield
    rig.synchronize()
    rig.stop_peer()


def capture(rig: Rig, figures: Findings) -> None:
    """Does a CUDA graph take a signal and a wait, and do both happen when it runs?"""
    if not torch.cuda.is_available():
        figures.put("refused", "there are no CUDA graphs here")
        return
    driver, graph = load_driver(), torch.cuda.CUDAGraph()
    ready, done = (driver.device_address(rig.memory.address + offset) for offset in (READY, DONE))
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            stream = torch.cuda.current_stream().cuda_stream
            driver.write_value(stream, ready, 1)
            driver.wait_value(stream, done, 1)
    except (DeviceError, RuntimeError) as error:
        figures.put("refused", str(error))
        return
    rig.start_peer("echo", num_rounds=1)
    graph.replay()
    rig.synchronize()
    torch.cuda.synchronize()
    figures.put("seen", [rig.load(READY), rig.load(DONE)])


class _Rounds:
    """Enqueues rounds of payload and flag, and counts what was wrong."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        sizes = rig.sizes
        self._out = {size: rig.zeros(size) for size, _ in sizes.payloads}
        self._in = {size: rig.zeros(size) for size, _ in sizes.payloads}
        self._counts = {size: Count(rig, size) for size, _ in sizes.payloads}
        self._ready, self._done = rig.word(READY), rig.word(DONE)
        self._num_received = 0
        self.num_sent = 0
        # Every kernel once before a wait is outstanding: its first launch may hang then.
        for size, _ in sizes.payloads:
            rig.fill(self._out[size], 0)
            self._counts[size].enqueue(self._out[size], 0)
        rig.synchronize()

    def run(self, num_rounds: int) -> None:
        """Enqueue rounds; the launch queue holds the caller back when it is full."""
        for _ in range(num_rounds):
            self._send()
            if self.num_sent > LAG:
                self._receive()

    def finish(self) -> None:
        """Receive what is under way, and wait."""
        while self._num_received < self.num_sent:
            self._receive()
        self._rig.synchronize()

    def wrong(self) -> dict[str, dict[str, int]]:
        """Wrong words by way, with those that were planted among them."""
        planted = [self._rig.sizes.payload_bytes(s) // 4 for s in PLANTED if s <= self.num_sent]
        on_device = sum(count.total() for count in self._counts.values())
        return {
            "to_host": {"words": self._rig.load(WRONG), "planted": sum(planted)},
            "to_device": {"words": on_device, "planted": sum(planted)},
        }

    def _slot(self, sequence: int, size: int, *, is_answer: bool) -> torch.Tensor:
        index = sequence % NUM_SLOTS + (NUM_SLOTS if is_answer else 0)
        return self._rig.host(size, PAYLOADS + index * self._rig.sizes.slot_bytes)

    def _send(self) -> None:
        rig, self.num_sent = self._rig, self.num_sent + 1
        sequence, size = self.num_sent, self._rig.sizes.payload_bytes(self.num_sent)
        rig.fill(self._out[size], sequence + (sequence in PLANTED))
        rig.device.copy(rig.main, self._slot(sequence, size, is_answer=False), self._out[size])
        rig.device.signal(rig.main, self._ready, sequence)

    def _receive(self) -> None:
        rig, self._num_received = self._rig, self._num_received + 1
        sequence, size = self._num_received, self._rig.sizes.payload_bytes(self._num_received)
        rig.device.wait(rig.main, self._done, sequence)
        rig.device.copy(rig.main, self._in[size], self._slot(sequence, size, is_answer=True))
        self._counts[size].enqueue(self._in[size], sequence)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _percentiles(values: np.ndarray) -> dict[str, float]:
    at = {f"p{percent}": rounded(float(np.percentile(values, percent))) for percent in (50, 99)}
    return {**at, "max": rounded(float(values.max())), "num": values.size}


_WORKS = {
    "memory": shared_memory,
    "round-trip": round_trips,
    "streams-8": streams,
    "streams-32": streams,
    "link": link,
    "order": order,
    "uploads": uploads,
    "capture": capture,
}
