"""Holds a CUDA stream until the host has caught up: behind paced copies and host signals."""

from ...shm.words import wrap
from . import cuda_words
from .base import Word
from .cuda_signals import Waiter
from .cuda_streams import HostWork, StreamState


class Gates:
    """``go_words``: one per stream, initially 0, not used otherwise. The host counts them up."""

    def __init__(self, work: HostWork, waiter: Waiter, go_words: list[Word]) -> None:
        self._work = work
        self._waiter = waiter
        self._go_words = go_words
        self._numbers = [0] * len(go_words)

    def shut(self, state: StreamState) -> tuple[Word, int]:
        """The stream's word, and the next number, which the caller makes the host store."""
        index = state.stream.index
        self._numbers[index] = wrap(self._numbers[index] + 1)
        return self._go_words[index], self._numbers[index]

    def hold(self, state: StreamState) -> None:
        """Hold the stream, or the caller if the host waits, until the newest number is stored."""
        index = state.stream.index
        self._waiter.wait(state, self._go_words[index], self._numbers[index])

    def hold_for_signals(self, state: StreamState) -> None:
        """Call before an operation with visible effects: holds it behind the host signals."""
        owed, state.owed = state.owed, None
        if owed is None or self._work.are_done((owed,)):
            return
        go, number = self.shut(state)
        # The items of a stream are done in order, so this is behind the signal.
        self._work.after(state, lambda: cuda_words.store(go.host_address, number), is_signal=True)
        self.hold(state)
