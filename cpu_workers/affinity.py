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
    """What came of an attempt to pin a thread."""

    asked: tuple[int, ...]
    granted: tuple[int, ...]  # where the thread may run now
    error: str | None = None  # why the kernel refused, if it did

    @property
    def is_exact(self) -> bool:
        """Whether the thread runs where it was asked to and nowhere else."""
        return self.granted == self.asked

    def describe(self) -> str:
        """Say in words what differs from what was asked."""
        reason = f": {self.error}" if self.error else ""
        return f"asked for CPU {_text(self.asked)}, runs on {_text(self.granted)}{reason}"


def pin_thread(cpus: Iterable[int]) -> Pinning:
    """Pin the calling thread, and the threads that it starts from now on, to ``cpus``.

    Where the kernel, or a sandbox, refuses, the thread stays as it is. A set of which only some
    are allowed is cut by the kernel without an error, so what is granted is read back.
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

    () = the thread keeps its CPUs. A refusal of the kernel is logged; the thread works anywhere.
    """
    limit_torch_threads()
    if not cpus:
        return
    pinning = pin_thread(cpus)
    if not pinning.is_exact:
        _LOG.info("thread %s: %s", threading.current_thread().name, pinning.describe())


def limit_torch_threads() -> bool:
    """Let torch compute on one thread where the calling thread uses it; returns whether it does.

    Otherwise torch starts an OpenMP helper for each thread that handles a large tensor. libgomp
    then counts more threads than cores, and every OpenMP thread of the process sleeps between
    loops instead of spinning. Other threads keep their number, and so do kernels of ours. A
    process that has not imported torch stays without it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):  # absent, or still being imported
        return False
    # The first question makes torch set its own number in this thread, so it comes first.
    if torch.get_num_threads() == 1:
        return True
    folder = Path(str(torch.__file__)).parent / "lib"
    for library in folder.glob("libgomp*.so*"):  # the one that torch has loaded
        ctypes.CDLL(str(library)).omp_set_num_threads(1)
    return bool(torch.get_num_threads() == 1)


def _text(cpus: tuple[int, ...]) -> str:
    return ",".join(map(str, cpus))
