"""Interface of scheduling policies: which request is admitted next, and which is preempted.

The scheduler handles blocks, adapters, steps and results, and asks a policy for order. A policy
knows requests and time. It sees room on the device only through verdicts on the candidates that it
offers.
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..errors import ConfigError
from ..memory.grant import Verdict
from ..request import Request
from .limits import DEFAULT_MAX_OVERTAKING_TOKENS
from .step_times import StepTimes

NO_ROOM = frozenset({Verdict.NO_KV, Verdict.NO_ADAPTER})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """Facts that a policy gets at its start. Raises ``ConfigError`` that names the flag."""

    times: StepTimes
    capacity_tokens: int  # KV that fits into the memory of KV and adapters
    bytes_per_token: float  # of KV
    slo_ttft_s: float | None = None  # None = 5 times the first token of an idle engine
    max_overtaking_tokens: int = DEFAULT_MAX_OVERTAKING_TOKENS

    def __post_init__(self) -> None:
        if self.slo_ttft_s is not None and not self.slo_ttft_s > 0:
            raise ConfigError(f"--slo-ttft-s is {self.slo_ttft_s:g}, must be above 0")


class SchedulerPolicy(Protocol):
    """Orders waiting requests. Each implementation states how far a request can be overtaken.

    In overload no bound in seconds holds. The bound is the number of tokens of later requests that
    are admitted before a request that fits the device.
    """

    def __len__(self) -> int:
        """Return the number of waiting requests."""

    def add(self, request: Request, now_s: float) -> None:
        """Add a request that has arrived, or was preempted (it may have output tokens then)."""

    def remove(self, request: Request) -> None: ...

    def ended(self, request: Request, now_s: float) -> None:
        """Drop the record of a request that has ended. If it waited, ``remove`` came first."""

    def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
        """Yield waiting requests. Each ``send`` passes the verdict on the last one.

        The policy stops if a verdict blocks the requests behind. The scheduler stops when no
        further request may run. Only the first candidate may displace adapters of other waiting
        requests.
        """

    def upcoming(self, max_requests: int) -> Sequence[Request]:
        """Return the first waiting requests in order of admission, to load their adapters ahead."""

    def prefill_order(self, requests: list[Request], now_s: float) -> Sequence[Request]:
        """Order the running requests that have more than one token to compute."""

    def squash(self, running: Collection[Request], now_s: float) -> Collection[Request]:
        """Choose running requests to preempt now, even if memory is not short.

        They wait again (``add``), keep their tokens and are recomputed.
        """

    def wake_at_s(self) -> float | None:
        """Return when the policy may decide differently without an event; None = never."""

    def victim(self, running: Collection[Request]) -> Request:
        """Choose the running request that is preempted when memory runs out.

        One request must always progress: no sequence of choices may preempt them all.
        """


@runtime_checkable
class PolicyWithLimits(Protocol):
    """Additional interface of policies that hold requests back by limits of their own."""

    def counts(self) -> Mapping[str, float]:
        """Return the gauges of the policy by name."""

    def held_back(self) -> Sequence[Request]:
        """Return requests that the last ``candidates`` did not offer because of a limit."""
