"""Requests that wait before the engine gets them: for an adapter's files, or for a grammar."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..sampling import StructuredOutput
from ..scheduler.events import TimePart
from .messages import AddRequest, RequestTiming


class _Needs(NamedTuple):
    """What a request waits for."""

    adapter_name: str | None  # for its files to be read
    structured: StructuredOutput | None  # for its grammar to be compiled


_NOTHING = _Needs(None, None)
Ended = list[tuple[int, RequestTiming]]  # ids and timings of requests that have ended while held


class HeldRequests:
    """The held requests of an engine."""

    def __init__(
        self,
        must_read: Callable[[str], bool],
        must_compile: Callable[[StructuredOutput], bool],
        clock: Callable[[], float],
    ) -> None:
        """``must_read``, ``must_compile``: whether requests must wait; begin what they wait for."""
        self._must_read = must_read
        self._must_compile = must_compile
        self._clock = clock
        # With their arrival times, by what they wait for.
        self._held: dict[_Needs, dict[int, tuple[AddRequest, float]]] = {}

    def __iter__(self) -> Iterator[AddRequest]:
        return (request for held in self._held.values() for request, _ in held.values())

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

    def hold(self, request: AddRequest) -> bool:
        """Hold a request that must wait; return whether it must."""
        needs = self._needs(_Needs(request.adapter_name, request.sampling.structured_output))
        if needs == _NOTHING:
            return False
        held = self._held.setdefault(needs, {})
        held[request.request_id] = request, self._clock() - request.waited_s
        return True

    def release(self) -> list[tuple[AddRequest, float | None]]:
        """Return the requests that wait no more, with the times since which files were read.

        What they waited for is there, or has failed.
        """
        released: list[tuple[AddRequest, float | None]] = []
        for needs in [one for one in self._held if self._needs(one) == _NOTHING]:
            for request, arrival_s in self._held.pop(needs).values():
                # Compiling takes milliseconds, and counts as no part of the engine's time.
                released.append((request, None if needs.adapter_name is None else arrival_s))
        return released

    def first_arrival_s(self) -> float | None:
        """When the first of them arrived; None = there is none."""
        arrivals_s = [at_s for held in self._held.values() for _, at_s in held.values()]
        return min(arrivals_s, default=None)

    def end_overdue(self, max_wait_s: float) -> Ended:
        """End requests that have waited for ``max_wait_s``."""
        now_s = self._clock()
        return self._end(lambda _, arrival_s: now_s >= arrival_s + max_wait_s)

    def abort(self, request_ids: Sequence[int]) -> Ended:
        """End these requests; unknown ids are ignored."""
        ids = frozenset(request_ids)
        return self._end(lambda request_id, _: request_id in ids) if self._held else []

    def _end(self, is_over: Callable[[int, float], bool]) -> Ended:
        now_s, ended = self._clock(), []
        for needs, held in self._held.items():
            for request_id, (_, arrival_s) in list(held.items()):
                if is_over(request_id, arrival_s):
                    del held[request_id]
                    is_read = needs.adapter_name is None
                    parts = {} if is_read else {TimePart.DISK_READ.value: now_s - arrival_s}
                    ended.append((request_id, RequestTiming(parts, 0)))
        return ended

    def _needs(self, given: _Needs) -> _Needs:
        """Return for what of ``given`` requests must wait."""
        name, structured = given
        must_read = name is not None and self._must_read(name)
        must_compile = structured is not None and self._must_compile(structured)
        return _Needs(name if must_read else None, structured if must_compile else None)
