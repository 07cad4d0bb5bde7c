"""Reports which kernels are being compiled, as a first start takes long.

Compilers cache their results, so later starts report nothing. While serving, a compilation may take
longer than a step, and is published as progress. Owns the listeners that it registers with numba
and Triton for the duration of a ``with`` block.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numba.core.event as numba_events
import torch

from ...shm.kept_code import why_code_is_not_kept

# Packages of kernels, in the order in which an engine on the CPU first uses them.
_GROUPS = {
    "corun.shm": "signals and waits",
    "corun.gpu.device": "signals and waits",
    "corun.cpu_workers.kernels.lora": "LoRA",
    "corun.cpu_workers.kernels.linear": "linear products",
    "corun.cpu_workers.kernels.fused": "norms, rotary embeddings and activations",
    "corun.cpu_workers.kernels.attention": "attention",
    "corun.gpu.replay": "replays of decode passes",
}
_NAMES = tuple(dict.fromkeys(_GROUPS.values()))
_REPORTED_S = 1.0  # a kernel that took longer gets its own line


class _Reporter(numba_events.Listener):  # type: ignore[misc]  # numba has no types
    """Counts and reports compilations. Callees are compiled within their caller's time."""

    def __init__(self, on_progress: Callable[[str], None]) -> None:
        self._on_progress = on_progress
        self._open = threading.local()
        self._reported: set[str] = set()
        self._stage = ""  # of the start, in which kernels are compiled
        self.num_compiled = 0
        self.total_s = 0.0

    def begin_stage(self, text: str) -> None:
        """Report what is done from now on."""
        self._stage = text
        self._on_progress(text)

    def on_start(self, event: Any) -> None:
        open_starts = self._open.__dict__.setdefault("starts", [])
        open_starts.append(time.perf_counter())
        function = event.data["dispatcher"].py_func
        group = _group_of(function.__module__)
        if len(open_starts) == 1 and group is not None and group not in self._reported:
            self._reported.add(group)
            num_left = len(_NAMES) - 1 - _NAMES.index(group)
            self._on_progress(
                f"compiling kernels for {group}; at most {num_left} of {len(_NAMES)} groups follow"
            )

    def on_end(self, event: Any) -> None:
        start_s = self._open.starts.pop()
        if not self._open.starts:
            self.count(event.data["dispatcher"].py_func.__name__, time.perf_counter() - start_s)

    def count(self, name: str, seconds: float) -> None:
        self.num_compiled += 1
        self.total_s += seconds
        if seconds >= _REPORTED_S:
            self._on_progress(f"compiled {name.strip('_')} in {seconds:.1f} s")
            if self._stage:  # which goes on
                self._on_progress(self._stage)

    def on_triton(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """Called when Triton has compiled a kernel, or found it in its cache; times are in us."""
        if not cache_hit:
            self.count(str(src.name), times.total * 1e-6)


def _group_of(module: str) -> str | None:
    return next((name for where, name in _GROUPS.items() if module.startswith(where)), None)


@contextmanager
def compilation_reported(on_progress: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Report compilations inside as they start, and finally the number of kernels and the time.

    Yields a function that reports a stage of the start, again after a kernel that took long.
    """
    reporter = _Reporter(on_progress)
    with numba_events.install_listener("numba:compile", reporter), _triton_reports(reporter):
        yield reporter.begin_stage
    if reporter.num_compiled:
        kept = "they are kept for the next start"
        if why_code_is_not_kept() is not None:
            kept = "they are not kept, so the next start compiles them again"
        on_progress(f"compiled {reporter.num_compiled} kernels in {reporter.total_s:.1f} s; {kept}")


class CompilationProgress(Protocol):
    """Is notified of compilations in one thread. They may be nested."""

    def begin_compilation(self) -> None:
        """The compilation of a kernel begins."""

    def end_compilation(self) -> None:
        """The compilation that began last has ended or failed."""


class _Publisher(numba_events.Listener):  # type: ignore[misc]  # numba has no types
    """Publishes compilations of the thread that made it.

    In a program that runs the engine in a thread, others may compile as well.
    """

    def __init__(self, progress: CompilationProgress) -> None:
        self._progress = progress
        self._thread_id = threading.get_ident()

    def on_start(self, event: Any) -> None:
        if threading.get_ident() == self._thread_id:
            self._progress.begin_compilation()

    def on_end(self, event: Any) -> None:
        if threading.get_ident() == self._thread_id:
            self._progress.end_compilation()


@contextmanager
def compilation_published(progress: CompilationProgress) -> Iterator[None]:
    """Publish the calling thread's compilations inside the block."""
    with numba_events.install_listener("numba:compile", _Publisher(progress)):
        yield


@contextmanager
def _triton_reports(reporter: _Reporter) -> Iterator[None]:
    if not torch.cuda.is_available():  # Triton is not used, and importing it is slow
        yield
        return
    try:
        from triton import knobs
    except ImportError:  # not installed, so not used
        yield
        return
    previous = knobs.compilation.listener
    knobs.compilation.listener = reporter.on_triton
    try:
        yield
    finally:
        knobs.compilation.listener = previous
