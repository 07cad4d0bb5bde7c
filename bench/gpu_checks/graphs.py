"""Question 7: can a signal and a wait be captured in a CUDA graph and replayed?

A captured value is frozen, so flags do not count up: the device sets the worker's flag to 1, waits
for the answer's flag to be 1, and sets that back to 0, all in the graph; the worker sets its own
flag back when it has seen it. Payloads come from a counter that the graph itself advances.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cuda_driver import load_driver
from corun.gpu.device.cuda_runtime import TorchRuntime

from gpu_checks import layout
from gpu_checks.figures import Figures
from gpu_checks.rig import Rig, use_rig

_NUM_WORDS = 1024
_AHEAD = 20  # replays enqueued at once


@dataclass(frozen=True, slots=True)
class _Operations:
    """Signal and wait on the current stream, by device address."""

    signal: Callable[[int, int], None]
    wait: Callable[[int, int], None]


def graph_capture(kind: str, limit_s: float, figures: Figures) -> None:
    """Capture one round trip with both payloads, replay it, and count wrong words."""
    use_rig(kind, limit_s, lambda rig: _graph_capture_with(rig, figures))


def _graph_capture_with(rig: Rig, figures: Figures) -> None:
    body = _Round(rig, _make_operations(rig))
    body.warm()
    graph = torch.cuda.CUDAGraph()
    error = _capture(graph, body.enqueue)
    figures.put("captured", error is None)
    if error is not None:
        figures.put("error", error)
        return
    num_replays = rig.sizes.num_replays
    body.reset()
    rig.start_peer("constant", num_rounds=num_replays)
    start_s = time.perf_counter()
    for replay in range(num_replays):
        graph.replay()
        if (replay + 1) % _AHEAD == 0:
            _await_current_stream(rig)
    _await_current_stream(rig)
    figures.put("replays", num_replays)
    figures.put("us_per_replay", round((time.perf_counter() - start_s) / num_replays * 1e6, 2))
    figures.put("wrong_words_to_worker", rig.load(layout.ERRORS))
    figures.put("wrong_words_to_device", int(body.errors.item()))
    figures.put("rounds_counted_by_device", int(body.counter.item()))
    figures.put("flags_at_end", [rig.load(layout.READY), rig.load(layout.DONE)])


def _capture(graph: torch.cuda.CUDAGraph, enqueue: Callable[[], None]) -> str | None:
    """What is captured runs in no stream; returns what CUDA objects to."""
    refusals: list[str] = []
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            try:
                enqueue()
            except (RuntimeError, DeviceError) as error:
                # The end of the capture, which fails next, says less.
                refusals.append(str(error))
    except RuntimeError as error:
        refusals.append(str(error))
    return "; ".join(refusals) or None


def _make_operations(rig: Rig) -> _Operations:
    def handle() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    if rig.kind == "stream-op":
        driver = load_driver()
        return _Operations(
            lambda address, value: driver.write_value(handle(), address, value),
            lambda address, value: driver.wait_value(handle(), address, value),
        )
    from corun.gpu.device.cuda_kernels import TritonKernels

    kernels = TritonKernels(TorchRuntime())
    status = rig.memory.device_address + layout.STATE

    def wait(address: int, value: int) -> None:
        kernels.wait(torch.cuda.current_stream(), address, value, status, timeout_s=60.0)

    return _Operations(
        lambda address, value: kernels.signal(torch.cuda.current_stream(), address, value), wait
    )


class _Round:
    """What is captured."""

    def __init__(self, rig: Rig, operations: _Operations) -> None:
        self._rig = rig
        self._by = operations
        self._ready = rig.memory.device_address + layout.READY
        self._done = rig.memory.device_address + layout.DONE
        self._x = rig.host(layout.X_OFFSET, _NUM_WORDS)
        self._y = rig.host(layout.X_OFFSET + 4 * _NUM_WORDS, _NUM_WORDS)
        self._out, self._in = rig.zeros(_NUM_WORDS), rig.zeros(_NUM_WORDS)
        self.counter, self.errors = rig.zeros(1), rig.zeros(1)

    def warm(self) -> None:
        """Run it once with the answer there already: capture must load nothing."""
        self._rig.store(layout.DONE, 1)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.enqueue()
        stream.synchronize()

    def reset(self) -> None:
        """Forget what the warm-up counted."""
        self.counter.zero_()
        self.errors.zero_()
        torch.cuda.synchronize()

    def enqueue(self) -> None:
        """One round on the current stream."""
        self.counter.add_(1)
        self._out.copy_(self.counter.expand(_NUM_WORDS))
        self._x.copy_(self._out, non_blocking=True)
        self._by.signal(self._ready, 1)
        self._by.wait(self._done, 1)
        self._by.signal(self._done, 0)
        self._in.copy_(self._y, non_blocking=True)
        self.errors.add_((self._in != 2 * self.counter).sum().to(torch.int32))


def _await_current_stream(rig: Rig) -> None:
    """Poll, because CUDA's own wait has no deadline."""
    event = torch.cuda.Event()
    event.record()
    rig.until(partial(event.query), "the replays", 20.0)
