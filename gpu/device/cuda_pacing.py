"""Makes copies on a CUDA stream take as long as on a slower link.

Around the copy: the host agent notices that the stream has reached it, starts the transfer on the
link, and stores a go word at its end; behind the copy the stream waits for that word. The copy
itself runs meanwhile, so a paced copy takes the longer of the two times.

Accuracy: the agent polls, so it is some 100 us late on a quiet machine, and the wait adds its own
latency. A copy that directly follows another on its stream starts, on the link, where that one
ended, so the delay does not accumulate over chunks. Where the host waits for words, the calling
thread is held until the copy's end.
"""

from ...profiles.link import Direction
from . import cuda_words
from .base import Word
from .cuda_gates import Gates
from .cuda_streams import HostWork, StreamState
from .link import LinkTransfer, PacedLink


class _PacedCopy:
    """One transfer on the link, driven by the agent."""

    def __init__(
        self, link: PacedLink, direction: Direction, num_bytes: int, follows: "_PacedCopy | None"
    ) -> None:
        self._link = link
        self._direction = direction
        self._num_bytes = num_bytes
        self._follows = follows
        self._transfer: LinkTransfer | None = None
        self._end_s: float | None = None

    def due_s(self) -> float:
        """The expected end of the transfer; the first call starts it."""
        if self._transfer is None:
            start_s = None if self._follows is None else self._follows._end_s
            self._follows = None  # otherwise every copy would keep all earlier ones alive
            self._transfer = self._link.begin(self._direction, self._num_bytes, start_s=start_s)
        return self._link.expected_s(self._transfer)

    def finish(self, go: Word, number: int) -> None:
        """Release the stream."""
        try:
            if self._transfer is not None:
                self._end_s = self._link.finish(self._transfer)
        finally:
            cuda_words.store(go.host_address, number)


class Pacing:
    """Paces the copies of streams."""

    def __init__(self, link: PacedLink, work: HostWork, gates: Gates) -> None:
        self._link = link
        self._work = work
        self._gates = gates

    def begin(self, state: StreamState, direction: Direction, num_bytes: int) -> None:
        """Call before the copy is enqueued."""
        follows = state.paced
        assert follows is None or isinstance(follows, _PacedCopy)
        paced = _PacedCopy(self._link, direction, num_bytes, follows)
        go, number = self._gates.shut(state)
        self._work.after(state, lambda: paced.finish(go, number), due_s=paced.due_s, is_signal=True)
        state.paced = paced

    def end(self, state: StreamState) -> None:
        """Call after the copy is enqueued: hold the stream until the link has carried it."""
        self._gates.hold(state)
