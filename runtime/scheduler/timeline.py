"""Records what each request waits for until its first token. Pure.

A record changes with events of its own request, so waiting requests cost nothing in a step: each
keeps the reason that the scheduler gave last. The parts of a request add up to its time in the
engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..plan import RequestId
from ..request import Request
from .cold import StepRows
from .events import PreemptionCause, TimePart, TimeParts
from .step_times import StepTimes

_Shares = tuple[tuple[TimePart, float], ...]  # of the current time; their sum is 1

_WORDS: Mapping[str, str] = {
    TimePart.ORDER: "other requests to go first",
    TimePart.POLICY_LIMIT: "a limit of the scheduling policy",
    TimePart.KV_MEMORY: "KV memory",
    TimePart.ADAPTER_MEMORY: "memory for its adapter",
    TimePart.DISK_READ: "its adapter's files to be read",
    TimePart.ADAPTER_LOAD: "its adapter to be loaded",
    TimePart.KV_SWAP_IN: "KV to be copied back from the host",
    TimePart.STEP_BUDGET: "room in steps that were full",
    TimePart.COMPUTE: "its own tokens to be computed",
    TimePart.CO_SCHEDULED: "other requests' tokens in the same steps",
    TimePart.COLD_WAIT: "layers of its adapter that were still loading",
    TimePart.CPU_WAIT: "CPU cores that other processes used",
    TimePart.RECOMPUTE: "tokens that had to be computed again",
}
_NUM_SHOWN = 2  # parts that ``describe`` names
# Reasons for waiting that more memory and more slots would not change.
_DEFERRED = (TimePart.POLICY_LIMIT, TimePart.DISK_READ, TimePart.ADAPTER_LOAD, TimePart.KV_SWAP_IN)


def describe(timing: TimeParts) -> str:
    """Describe the largest parts in words."""
    largest = sorted(timing.parts.items(), key=lambda item: -item[1])[:_NUM_SHOWN]
    shown = []
    for part, seconds in largest:
        text = f"{seconds:.3g} s for {_WORDS[part]}"
        number = timing.num_in_the_way.get(part)
        if number:
            text += f", which {number} running request{'s' * (number > 1)} held"
        shown.append(text)
    return "waited " + " and ".join(shown) if shown else "waited for nothing"


@dataclass(slots=True, eq=False)
class _Timeline:
    """Parts of the time of one request."""

    request: Request
    since_s: float
    shares: _Shares = ((TimePart.ORDER, 1.0),)
    warm_s: float | None = None  # time of the current step if the adapter were on the device
    cpu_wait_s: float = 0.0  # since ``since_s``
    parts: dict[str, float] = field(default_factory=dict)
    num_in_the_way: dict[str, int] = field(default_factory=dict)

    def waits(self, part: TimePart, now_s: float) -> None:
        if self.shares[0][0] is not part:
            self.turn(now_s, ((part, 1.0),))

    def turn(self, now_s: float, shares: _Shares, warm_s: float | None = None) -> None:
        """Add the time that has passed to its parts, and divide time from now on by ``shares``."""
        passed_s = now_s - self.since_s
        cpu_wait_s = min(passed_s, self.cpu_wait_s)
        self._add(TimePart.CPU_WAIT, cpu_wait_s)
        passed_s -= cpu_wait_s
        if self.warm_s is not None and passed_s > self.warm_s:
            self._add(TimePart.COLD_WAIT, passed_s - self.warm_s)
            passed_s = self.warm_s
        for part, share in self.shares:
            self._add(part, passed_s * share)
        self.since_s, self.shares, self.warm_s, self.cpu_wait_s = now_s, shares, warm_s, 0.0

    def _add(self, part: TimePart, seconds: float) -> None:
        if seconds:
            self.parts[part] = self.parts.get(part, 0.0) + seconds


class Timelines:
    """Timelines of all requests without a first token."""

    def __init__(self, times: StepTimes | None = None) -> None:
        """``times``: predicts steps as if all requests were warm; None = no ``COLD_WAIT``."""
        self.total_s: dict[str, float] = {}  # of all closed timelines
        self._times = times
        self._open: dict[RequestId, _Timeline] = {}
        self.open_ids = self._open.keys()  # a live view
        self._running: dict[RequestId, _Timeline] = {}  # the open ones of running requests

    def arrived(self, request: Request, now_s: float) -> None:
        """Begin with a new request. The time since its arrival was spent on ``DISK_READ``."""
        since_s = min(request.arrival_s, now_s)
        timeline = _Timeline(request, since_s, ((TimePart.DISK_READ, 1.0),))
        timeline.waits(TimePart.ORDER, now_s)
        self._open[request.request_id] = timeline

    def waits(self, request: Request, part: TimePart, num_running: int, now_s: float) -> None:
        timeline = self._open.get(request.request_id)
        if timeline is None:
            return
        if part in (TimePart.KV_MEMORY, TimePart.ADAPTER_MEMORY):
            timeline.num_in_the_way[part] = num_running
        timeline.waits(part, now_s)

    def preempted(self, request: Request, cause: PreemptionCause, num_running: int, now_s: float) -> None:
        self._running.pop(request.request_id, None)
        short = cause is PreemptionCause.KV_MEMORY
        self.waits(request, TimePart.KV_MEMORY if short else TimePart.ORDER, num_running, now_s)

    def starts(self, request: Request) -> None:
        """Record that a request runs from the next step on."""
        timeline = self._open.get(request.request_id)
        if timeline is not None:
            self._running[request.request_id] = timeline

    def planned(self, rows: StepRows, now_s: float) -> None:
        """Record the rows of a step. O(rows + running requests without a first token)."""
        if not self._running:
            return
        own = {request.request_id: 1 for request in rows.decodes}
        own |= {request.request_id: number for request, number in rows.chunks}
        own |= {request.request_id: chunk.num_tokens for request, chunk in rows.cold_chunks}
        num_tokens = sum(own.values())
        for request_id, timeline in self._running.items():
            if num_own := own.get(request_id):
                self._computes(timeline, num_own, num_tokens, now_s)
            elif not timeline.request.num_in_flight_steps:
                timeline.waits(_why_not_planned(timeline.request), now_s)

    def computed(self, cpu_wait_s: float) -> None:
        """Record that a step has ended, which waited ``cpu_wait_s`` for CPU cores."""
        if cpu_wait_s:
            for timeline in self._running.values():
                timeline.cpu_wait_s += cpu_wait_s

    def end(self, request_id: RequestId, now_s: float) -> TimeParts | None:
        """Close a timeline at the first token, or at the end without one. None = closed before."""
        timeline = self._open.pop(request_id, None)
        if timeline is None:
            return None
        self._running.pop(request_id, None)
        timeline.turn(now_s, timeline.shares)
        for part, seconds in timeline.parts.items():
            self.total_s[part] = self.total_s.get(part, 0.0) + seconds
        request = timeline.request
        return TimeParts(
            timeline.parts,
            timeline.num_in_the_way,
            request.num_predicted_output_tokens,
            request.adapter_version,
        )

    def num_deferred(self) -> int:
        """Return how many wait for a load, a copy or a limit. O(requests without a first token)."""
        return sum(timeline.shares[0][0] in _DEFERRED for timeline in self._open.values())

    def _computes(self, timeline: _Timeline, num_own: int, num_tokens: int, now_s: float) -> None:
        """Record that a step of ``num_tokens`` tokens computes ``num_own`` of the request."""
        request = timeline.request
        share = num_own / num_tokens
        # Tokens below ``num_lost_tokens`` were computed before. The request already counts the rows
        # of this step as computed.
        is_again = request.num_computed_tokens - num_own < request.num_lost_tokens
        part = TimePart.RECOMPUTE if is_again else TimePart.COMPUTE
        warm_s = None
        if request.is_cold and self._times is not None:
            warm_s = self._times.prefill_s(num_tokens, request.adapter_bytes) or None
        timeline.turn(now_s, ((part, share), (TimePart.CO_SCHEDULED, 1 - share)), warm_s)


def _why_not_planned(request: Request) -> TimePart:
    """Return why a running request without a row in flight has no row in this step."""
    if request.num_known_tokens > request.num_allocated_tokens:
        return TimePart.KV_MEMORY
    return TimePart.COLD_WAIT if request.is_cold else TimePart.STEP_BUDGET
