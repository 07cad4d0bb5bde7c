"""Pins threads to CPUs, and tells what the kernel really granted."""

import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

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
    """Pin the calling thread, which helps others, to ``cpus``; () = it stays where it is.

    What the kernel refuses is logged and no more: the thread works anywhere.
    """
    if not cpus:
        return
    pinning = pin_thread(cpus)
    if not pinning.is_exact:
        _LOG.info("thread %s: %s", threading.current_thread().name, pinning.describe())


def _text(cpus: tuple[int, ...]) -> str:
    return ",".join(map(str, cpus))
