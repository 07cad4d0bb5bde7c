"""How the kernels of the CPU device are called, so that a pass can be captured and replayed.

Whoever calls kernels asks for the launcher of its thread: as a rule one that calls them and nothing
else; while a pass is being captured, one that also notes what it is asked for. Not handed from
caller to callee, because transformers' modules stand between the two and pass nothing on.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .batch import PassMetadata

Thing = TypeVar("Thing")


class Launcher:
    """Calls kernels; a pass that it serves is not made again."""

    is_noting = False  # whether calls count although they would compute nothing

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Call a compiled kernel that takes numbers alone, now and at every replay.

        What lies at the addresses may differ then; the addresses and all other numbers may not.
        """
        kernel(*arguments)

    def new_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory on the CPU for what a kernel computes, at every replay anew."""
        return torch.empty(shape, dtype=dtype)

    def keep(self, thing: Thing) -> Thing:
        """Keep what lies at an address of an argument alive and as it is."""
        return thing

    def call_in_every_pass(self, call: Callable[[], None]) -> None:
        """Call Python code now and at this place of every replay; what it computes is not noted."""
        call()

    def refuse(self, reason: str) -> None:
        """Say that the pass depends on more than a replay is told."""

    def before_replay(self, key: Hashable, prepare: Callable[[PassMetadata], None]) -> None:
        """Have ``prepare`` called before every replay; one for each ``key``."""


class _OfThread(threading.local):
    launcher = Launcher()


_OF_THREAD = _OfThread()


def current_launcher() -> Launcher:
    """What this thread calls kernels through."""
    return _OF_THREAD.launcher


@contextmanager
def launching(launcher: Launcher) -> Iterator[None]:
    """Let this thread call kernels through ``launcher`` inside the ``with`` block."""
    before = _OF_THREAD.launcher
    _OF_THREAD.launcher = launcher
    try:
        yield
    finally:
        _OF_THREAD.launcher = before
