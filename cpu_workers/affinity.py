"""Pins threads to CPUs, reports what the kernel granted, limits what torch starts in a thread."""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pinning:
    """The result of pinning a thread."""

    asked: tuple[int, ...]
    granted: tuple[int, ...]  # CPUs on which the thread may run now
    error: str | None = None  # why the kernel refused, if it did

    @property
    def is_exact(self) -> bool:
        """Whether the thread runs on exactly the requested CPUs."""
        return self.granted == self.asked

    def describe(self) -> str:
        """The difference from the request, for logs."""
        reason = f": {self.error}" if self.error else ""
        return f"requested CPU {_text(self.asked)}, runs on {_text(self.granted)}{reason}"


def pin_thread(cpus: Iterable[int]) -> Pinning:
    """Pin the calling thread, and the threads that it starts from now on, to ``cpus``.

    If the kernel or a sandbox refuses, the thread is not moved. The kernel silently reduces a set
    of which only some CPUs are allowed, so the granted set is read back.
    """
    asked = tuple(sorted(cpus))
    error = None
    try:
        os.sched_setaffinity(0, asked)
    except OSError as failure:
        error = failure.strerror or str(failure)
    return Pinning(asked, tuple(sorted(os.sched_getaffinity(0))), error)


def place_thread(cpus: tuple[int, ...]) -> None:
    """Pin the calling helper thread to ``cpus``, and limit torch in it to one thread.

    () = the thread keeps its CPUs. A refusal of the kernel is logged and otherwise ignored.
    """
    limit_torch_threads()
    if not cpus:
        return
    pinning = pin_thread(cpus)
    if not pinning.is_exact:
        _LOG.info("thread %s: %s", threading.current_thread().name, pinning.describe())


def limit_torch_threads() -> bool:
    """Limit torch to one thread in the calling thread, if it is loaded; returns whether it is.

    Otherwise torch starts an OpenMP helper for each thread that handles a large tensor. libgomp
    then counts more threads than cores, and every OpenMP thread of the process sleeps between
    loops instead of spinning. The numbers of other threads and of corun's kernels do not change.
    Does not import torch.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):  # absent, or still being imported
        return False
    # The first query makes torch set its own numbers in this thread, so it comes first.
    is_limited = torch.get_num_threads() == 1
    folder = Path(str(torch.__file__)).parent / "lib"
    for library in folder.glob("libtorch_cpu.so"):  # contains MKL, which has a number of its own
        limit_mkl = getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", None)
        if limit_mkl is not None:
            limit_mkl(1)
    if is_limited:
        return True
    for library in folder.glob("libgomp*.so*"):  # the library that torch has loaded
        ctypes.CDLL(str(library)).omp_set_num_threads(1)
    return bool(torch.get_num_threads() == 1)


def _text(cpus: tuple[int, ...]) -> str:
    return ",".join(map(str, cpus))
