"""Sends requests to an engine's core when they are due, and records their results.

It drives ``EngineCore.step`` and decides nothing. The caller provides the clock: virtual over a
simulated machine, or real over any device.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...profiles.link import Direction, LinkStats
from ..engine.core import EngineCore
from ..engine.messages import AddRequest, EngineStats
from ..errors import EngineDeadError, RequestError
from ..scheduler.events import RequestUpdate

# Far more than any step or load takes: an engine without output for this long is stuck.
_SILENCE_LIMIT_S = 600.0


@dataclass(slots=True)
class RequestRecord:
    """The result of one request. Times are seconds from the start of the replay."""

    request_id: int
    arrival_s: float  # when it was due, even if it was sent later
    first_token_s: float | None = None
    end_s: float | None = None
    num_output_tokens: int = 0
    finish_reason: str | None = None  # as in ``RequestUpdate``
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of its prompt
    num_host_cached_tokens: int = 0  # of these, from the host
    is_cold: bool = False  # its adapter was not on the device when it could have started
    # Seconds until its first token, by values of ``scheduler.events.TimePart``.
    parts_s: dict[str, float] = field(default_factory=dict)

    def apply(self, update: RequestUpdate, at_s: float) -> None:
        if update.token_ids:
            self.num_output_tokens += len(update.token_ids)
            if self.first_token_s is None:
                self.first_token_s = at_s
                self.num_cached_tokens = update.num_cached_tokens
                self.num_host_cached_tokens = update.num_host_cached_tokens
                self.is_cold = update.cold_start is not None
                self.parts_s = {} if update.timing is None else update.timing.parts
        if update.finish_reason is not None:
            self.end_s = at_s
            self.finish_reason = update.finish_reason
            self.num_preemptions = update.num_preemptions


@dataclass(frozen=True, slots=True)
class StepStats:
    """Steps with rows, since the executor was made."""

    num_steps: int = 0
    busy_s: float = 0.0  # from a step's plan, or the end of the step before, to its result


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay from its first arrival to its last token, or to where it was cut."""

    records: tuple[RequestRecord, ...]  # of requests that were accepted, by arrival
    refused: dict[str, int]  # numbers of requests that could never fit, by the reason
    stats: EngineStats  # at the end
    link: dict[str, LinkStats]  # by direction, at the end
    steps: StepStats  # at the end
    duration_s: float


# Called with the seconds from the start of a replay, and the core, after each of its turns.
Look = Callable[[float, EngineCore], None]


def look_at_nothing(now_s: float, core: EngineCore) -> None:
    """An observer that does nothing."""


def replay(
    core: EngineCore,
    arrivals: Sequence[tuple[float, AddRequest]],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    link_stats: Callable[[Direction], LinkStats],
    step_stats: Callable[[], StepStats],
    *,
    horizon_s: float = math.inf,
    look: Look = look_at_nothing,
) -> Replayed:
    """Send requests as they are due, and run until all have ended.

    Args:
        core: Without requests.
        arrivals: Seconds from now, never falling, and the request that arrives.
        clock: The core's clock: seconds.
        sleep: Waits on that clock.
        link_stats: Returns transfers over the core's link since it was made.
        step_stats: Returns steps of the core's executor.
        horizon_s: The replay is cut this long after the last arrival.
        look: An observer, called after each turn.

    Raises:
        EngineDeadError: No request makes progress.
    """
    run = _Run(core, arrivals, clock, sleep)
    end_s = (arrivals[-1][0] if arrivals else 0.0) + horizon_s
    while run.turn() and run.now_s < end_s:
        look(run.now_s, core)
    link = {direction.value: link_stats(direction) for direction in Direction}
    return run.result(link, step_stats())


class _Run:
    """A running replay."""

    def __init__(
        self,
        core: EngineCore,
        arrivals: Sequence[tuple[float, AddRequest]],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._core = core
        self._arrivals = arrivals
        self._clock = clock
        self._sleep = sleep
        self._start_s = self._heard_s = clock()
        self._num_sent = 0
        self._records: dict[int, RequestRecord] = {}
        self._refused: Counter[str] = Counter()

    @property
    def now_s(self) -> float:
        """Seconds from the start."""
        return self._clock() - self._start_s

    def turn(self) -> bool:
        """Send due requests, and let the core take a step; False at the end."""
        self._send_due()
        if not self._core.has_work:
            if self._num_sent == len(self._arrivals):
                return False
            wake_at_s = self._core.wake_at_s()
            next_s = min(self._next_arrival_s(), math.inf if wake_at_s is None else wake_at_s)
            self._sleep(max(0.0, next_s - self._clock()))
            self._heard_s = self._clock()
            if next_s < self._next_arrival_s():
                self._core.step()  # begins a transfer, perhaps
            return True
        updates = self._core.step(max(0.0, self._deadline_s() - self._clock()))
        now_s = self._clock()
        for update in updates:
            self._records[update.request_id].apply(update, now_s - self._start_s)
        if updates:
            self._heard_s = now_s
        elif now_s - self._heard_s >= _SILENCE_LIMIT_S:
            raise EngineDeadError(f"the engine has sent nothing for {_SILENCE_LIMIT_S:g} s")
        return True

    def result(self, link: dict[str, LinkStats], steps: StepStats) -> Replayed:
        return Replayed(
            tuple(self._records.values()),
            dict(sorted(self._refused.items())),
            self._core.stats(),
            link,
            steps,
            self.now_s,
        )

    def _deadline_s(self) -> float:
        """When the core must be polled again, if it has no output before."""
        return min(self._next_arrival_s(), self._heard_s + _SILENCE_LIMIT_S)

    def _next_arrival_s(self) -> float:
        if self._num_sent == len(self._arrivals):
            return math.inf
        return self._start_s + self._arrivals[self._num_sent][0]

    def _send_due(self) -> None:
        now_s = self._clock()
        while self._next_arrival_s() <= now_s:
            arrival_s, request = self._arrivals[self._num_sent]
            self._num_sent += 1
            try:
                self._core.add_request(request)
            except RequestError as error:
                self._refused[error.param or type(error).__name__] += 1
                continue
            self._records[request.request_id] = RequestRecord(request.request_id, arrival_s)
