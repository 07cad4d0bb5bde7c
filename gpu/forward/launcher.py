"""Calls kernels of the CPU device, so that a pass can be captured and replayed.

Callers of kernels use their thread's launcher. Usually it only calls them; while a pass is being
captured, it also records the calls. It is not passed as an argument, because transformers' modules
stand between the callers and pass nothing on.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .batch import PassMetadata

Thing = TypeVar("Thing")


class Launcher:
    """Calls kernels; passes with this launcher are not replayed."""

    is_recording = False  # whether calls matter even if they compute nothing

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Call a compiled kernel that takes only numbers, now and in every replay.

        The contents of its addresses may differ then; addresses and all other numbers may not.
        """
        kernel(*arguments)

    def new_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised CPU memory for a kernel's result, written again in every replay."""
        return torch.empty(shape, dtype=dtype)

    def keep_alive(self, thing: Thing) -> Thing:
        """Keep the memory at an argument's address alive and unchanged."""
        return thing

    def call_in_every_pass(self, call: Callable[[], None]) -> None:
        """Call Python code now and at this point of every replay; its calls are not recorded."""
        call()

    def refuse(self, reason: str) -> None:
        """Refuse the capture: the pass depends on inputs that a replay does not get."""

    def before_replay(self, key: Hashable, prepare: Callable[[PassMetadata], None]) -> None:
        """Call ``prepare`` before every replay; one for each ``key``."""


class _OfThread(threading.local):
    launcher = Launcher()


_OF_THREAD = _OfThread()


def current_launcher() -> Launcher:
    """The launcher of this thread."""
    return _OF_THREAD.launcher


@contextmanager
def launching(launcher: Launcher) -> Iterator[None]:
    """Use ``launcher`` for this thread's kernels inside the ``with`` block."""
    before = _OF_THREAD.launcher
    _OF_THREAD.launcher = launcher
    try:
        yield
    finally:
        _OF_THREAD.launcher = before
