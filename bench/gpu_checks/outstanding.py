"""Question 5: what goes on while a stream is held by a wait, and what stands still?

For each action a wait is made outstanding and a process without CUDA is told to end it, so that
nothing here can hang for good: an action that is done before that went on.
"""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from corun.gpu.device import cuda_words
from corun.gpu.device.base import DeviceError

from gpu_checks import layout
from gpu_checks.figures import Figures
from gpu_checks.kernels import compile_volatile_count, make_count
from gpu_checks.rig import Rig, use_rig

_BLOCKED_S = 0.05  # a launch that takes longer was blocked
_TICK_S = 0.001

Action = Callable[[], None]


def outstanding(kind: str, limit_s: float, figures: Figures) -> None:
    """Each action beside a wait of its own, then how far the host can run ahead of one."""
    use_rig(kind, limit_s, lambda rig: _outstanding_with(rig, figures))


def _outstanding_with(rig: Rig, figures: Figures) -> None:
    actions = _common_actions(rig) | ({} if rig.is_tiny else _cuda_actions(rig))
    figures.put("hold_s", rig.sizes.hold_s)
    num_waits = len(actions) + 2
    rig.start_peer("release", num_rounds=num_waits, hold_s=rig.sizes.hold_s, words="polled")
    for number, (name, action) in enumerate(actions.items(), 1):
        figures.put(name, _beside_a_wait(rig, number, action))
    values = rig.zeros(16)
    launch = partial(rig.launch, rig.transfer, lambda: values.add_(1))
    figures.put("launch queue", _fill_queue(rig, num_waits - 1, launch))
    figures.put("record queue", _fill_queue(rig, num_waits, partial(_record_again, rig)))


def _beside_a_wait(rig: Rig, number: int, action: Action) -> dict[str, Any]:
    """Whether the action ended while the stream was held, and how long it took."""
    rig.device.wait(rig.transfer, rig.word(layout.DONE), number)
    rig.store(layout.ARM, number)
    start_s = time.perf_counter()
    error = None
    try:
        action()
    except (RuntimeError, OSError, subprocess.SubprocessError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    took_s = time.perf_counter() - start_s
    went_on = rig.load(layout.DONE) < number
    rig.store(layout.CANCEL, number)
    # What failed in a launch is raised once more here.
    with contextlib.nullcontext() if error is None else contextlib.suppress(DeviceError):
        rig.synchronize()
    found: dict[str, Any] = {"went_on": went_on and error is None, "ms": round(took_s * 1e3, 3)}
    return found if error is None else {**found, "error": error}


def _until_done(rig: Rig, enqueue: Action) -> None:
    """Enqueue on the compute stream, and wait for its end or that of the wait."""
    event = rig.device.event()
    enqueue()
    rig.device.record(rig.compute, event)
    cuda_words.poll(lambda: rig.device.is_done(event), rig.sizes.hold_s + 5.0)
    rig.device.release_event(event)


def _common_actions(rig: Rig) -> dict[str, Action]:
    values, host = rig.zeros(1024), rig.host(layout.X_OFFSET, 1024)
    rig.launch(rig.compute, lambda: values.add_(1))
    rig.device.copy(rig.compute, values, host)
    rig.device.copy(rig.compute, host, values)
    rig.synchronize()

    def on_compute(enqueue: Action) -> Action:
        return lambda: _until_done(rig, enqueue)

    return {
        "kernel on another stream": on_compute(
            lambda: rig.launch(rig.compute, lambda: values.add_(1))
        ),
        "copy to the device": on_compute(partial(rig.device.copy, rig.compute, values, host)),
        "copy to the host": on_compute(partial(rig.device.copy, rig.compute, host, values)),
    }


def _cuda_actions(rig: Rig) -> dict[str, Action]:
    from cuda.bindings import driver

    values, out = torch.zeros(4096, device="cuda"), torch.zeros(4096, device="cuda")
    words, errors = rig.zeros(1024), rig.zeros(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        values.add_(1.0)
    # Volatile: a variant of the kernel that nothing here has loaded yet. It is compiled, and so is
    # its launcher, which it shares with the other variant.
    make_count(rig)(words, 0, errors)
    count = make_count(rig, is_volatile=True)
    compile_volatile_count(words, errors)
    torch.cuda.synchronize()
    kept: list[Any] = []

    def on_compute(compute: Callable[[], object]) -> Action:
        return lambda: _until_done(rig, lambda: rig.launch(rig.compute, compute))

    def free() -> None:
        kept.clear()
        torch.cuda.empty_cache()

    return {
        "graph launch": on_compute(graph.replay),
        # One that torch has compiled, unlike many of its special functions.
        "first launch of a torch kernel": on_compute(lambda: torch.hypot(values, values, out=out)),
        "first launch of a Triton kernel": on_compute(lambda: count(words, 0, errors)),
        "allocation from CUDA": lambda: kept.append(
            torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
        ),
        "freeing to CUDA": free,
        "pinned allocation": lambda: kept.append(
            torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        ),
        "making a stream": lambda: kept.append(_make_stream(driver)),
        "nvidia-smi": lambda: _run_nvidia_smi(rig.sizes.hold_s + 20),
    }


def _make_stream(driver: Any) -> Any:
    non_blocking = 1
    code, stream = driver.cuStreamCreate(non_blocking)
    if int(code) != 0:
        raise RuntimeError(f"cuStreamCreate returned {int(code)}")
    return stream


def _run_nvidia_smi(timeout_s: float) -> None:
    subprocess.run(["nvidia-smi"], check=True, capture_output=True, timeout=timeout_s)


class _Ticker:
    """A thread of this process: how long did it not come to run?"""

    def __init__(self) -> None:
        self.longest_gap_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Ticker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.perf_counter()
        while not self._is_over.wait(_TICK_S):
            now_s = time.perf_counter()
            self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
            last_s = now_s


def _record_again(rig: Rig) -> None:
    """A record is no kernel, and older torch keeps Python's lock in it."""
    event = rig.device.event()
    rig.device.record(rig.transfer, event)
    rig.device.release_event(event)


def _fill_queue(rig: Rig, number: int, enqueue: Action) -> dict[str, Any]:
    """Enqueue behind the wait until a call blocks; is Python's lock free meanwhile?"""
    enqueue()
    rig.synchronize()
    rig.device.wait(rig.transfer, rig.word(layout.DONE), number)
    rig.store(layout.ARM, number)
    depth, took_s = None, 0.0
    with _Ticker() as ticker:
        for launched in range(rig.sizes.max_queue_depth):
            start_s = time.perf_counter()
            enqueue()
            took_s = time.perf_counter() - start_s
            if took_s > _BLOCKED_S:
                depth = launched
                break
    was_held = rig.load(layout.DONE) < number
    rig.store(layout.CANCEL, number)
    rig.synchronize()
    return {
        "calls_before_one_blocked": depth,
        "tried": rig.sizes.max_queue_depth,
        "blocked_ms": round(took_s * 1e3, 1) if depth is not None else 0.0,
        "wait_held_to_the_end": was_held,
        "longest_pause_of_another_thread_ms": round(ticker.longest_gap_s * 1e3, 1),
    }
