"""How the kernels of the CPU device are called, so that a pass can be captured and replayed.

While the calling thread captures, a call is noted beside being made, and outputs lie in memory of
the capture's. Otherwise all of this costs no more than a look at a variable.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from .batch import PassMetadata

Thing = TypeVar("Thing")


class KernelCapture(Protocol):
    """Notes the kernel calls of one pass."""

    def launch(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        """Call ``kernel`` now, and with the same arguments at every replay.

        What lies at the addresses may differ then; the addresses and all other numbers may not.
        """
        ...

    def new_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory that a kernel fills, and fills again at every replay."""
        ...

    def keep(self, thing: Thing) -> Thing:
        """Keep what lies at an address of an argument alive and as it is."""
        ...

    def callback(self, call: Callable[[], None]) -> None:
        """Call it now and at this place of every replay; what it computes is its own affair."""
        ...

    def refuse(self, reason: str) -> None:
        """Say that the pass depends on more than a replay is told."""
        ...

    def before_replay(self, key: Hashable, prepare: Callable[[PassMetadata], None]) -> None:
        """Call ``prepare`` before every replay; one for each ``key``."""
        ...


_OF_THIS_THREAD = threading.local()


def current_capture() -> KernelCapture | None:
    """What captures in this thread, if anything does."""
    capture: KernelCapture | None = getattr(_OF_THIS_THREAD, "capture", None)
    return capture


@contextmanager
def capturing(capture: KernelCapture | None) -> Iterator[None]:
    """Let ``capture``, or nothing, note what this thread launches inside the ``with`` block."""
    before = current_capture()
    _OF_THIS_THREAD.capture = capture
    try:
        yield
    finally:
        _OF_THIS_THREAD.capture = before


def launch(kernel: Any, *arguments: Any) -> None:
    """Call a compiled kernel that takes numbers alone."""
    capture = current_capture()
    if capture is None:
        kernel(*arguments)
    else:
        capture.launch(kernel, arguments)


def new_output(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory on the CPU for what a kernel computes."""
    capture = current_capture()
    if capture is None:
        return torch.empty(shape, dtype=dtype)
    return capture.new_output(shape, dtype)


def call_in_every_pass(call: Callable[[], None]) -> None:
    """Call Python code that has to run in every pass, captured or not."""
    capture = current_capture()
    if capture is None:
        call()
    else:
        capture.callback(call)
