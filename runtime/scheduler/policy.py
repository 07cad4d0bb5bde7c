"""What a scheduling policy decides: who is admitted next, and who gives way.

The scheduler does the mechanics (blocks, adapters, steps, results) and asks a policy for order.
A policy knows requests and time; it sees room on the device only through the verdicts on the
candidates it offers.
"""

import enum
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..errors import ConfigError
from ..limits import MAX_QUEUES
from ..request import Request
from .config import DEFAULT_MAX_OVERTAKING_TOKENS
from .step_times import StepTimes


class Verdict(enum.Enum):
    """What came of a candidate for admission."""

    ADMITTED = "admitted"  # it runs; the policy no longer holds it
    LOADING = "loading"  # its adapter, or KV of it, is on the way, with its bytes taken
    NO_KV = "no_kv"  # there is no room for its tokens, known and predicted
    NO_ADAPTER = "no_adapter"  # there is no room for its adapter, or it is leaving the device


NO_ROOM = frozenset({Verdict.NO_KV, Verdict.NO_ADAPTER})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What a policy is told once. Raises ``ConfigError`` that names the flag."""

    times: StepTimes
    capacity_tokens: int  # KV that would fit into all memory of KV and adapters
    bytes_per_token: float  # of KV
    slo_ttft_s: float | None = None  # None = 5 times what first tokens take on an idle engine
    refresh_s: float = 300.0  # how often queues are cut anew, by policies that have them
    num_queues: int | None = None  # queues; None = as many as the sizes of requests suggest
    max_overtaking_tokens: int = DEFAULT_MAX_OVERTAKING_TOKENS

    def __post_init__(self) -> None:
        if self.num_queues is not None and not 1 <= self.num_queues <= MAX_QUEUES:
            raise ConfigError(f"--queues is {self.num_queues}, must be from 1 to {MAX_QUEUES}")
        if not self.refresh_s > 0:
            raise ConfigError(f"--refresh-s is {self.refresh_s:g}, must be above 0")
        if self.slo_ttft_s is not None and not self.slo_ttft_s > 0:
            raise ConfigError(f"--slo-ttft-s is {self.slo_ttft_s:g}, must be above 0")


class SchedulerPolicy(Protocol):
    """Order among waiting requests. Every implementation states how far one can be overtaken.

    Overload has no bound in seconds, so the bound is in work: the tokens of later-arrived
    requests that are admitted before a request which fits the device.
    """

    def __len__(self) -> int:
        """Waiting requests."""
        ...

    def add(self, request: Request, now_s: float) -> None:
        """A request waits: it has arrived, or was preempted (then it may have output tokens)."""
        ...

    def remove(self, request: Request) -> None:
        """A waiting request has ended."""
        ...

    def ended(self, request: Request, now_s: float) -> None:
        """A request that was running or waiting has ended; ``remove`` was called if it waited."""
        ...

    def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
        """Offer waiting requests one by one; each ``send`` brings the verdict on the last one.

        The policy stops where a verdict blocks those behind. The scheduler stops asking when the
        step is full. The first one offered may displace adapters of other waiting requests.
        """
        ...

    def upcoming(self, max_requests: int) -> Sequence[Request]:
        """Return the first waiting requests in order of admission: their adapters load ahead."""
        ...

    def prefill_order(self, requests: list[Request], now_s: float) -> Sequence[Request]:
        """Order running requests with more than one token to compute within a step."""
        ...

    def squash(self, running: Collection[Request], now_s: float) -> Collection[Request]:
        """Choose running requests that give their memory back now, without anybody growing.

        They wait again (``add``), keep their tokens and are recomputed.
        """
        ...

    def wake_at_s(self) -> float | None:
        """When the policy may decide otherwise although nothing has happened; None = never."""
        ...

    def victim(self, running: Collection[Request]) -> Request:
        """Choose the running request that is preempted when memory runs out.

        For progress, repeated choices must never come upon the same request as long as there
        are others: one request has to be the last for every policy.
        """
        ...


@runtime_checkable
class PolicyWithQueues(Protocol):
    """What a policy with several queues shows beside."""

    def counts(self) -> Mapping[str, float]:
        """What the policy shows of itself: gauges by name."""
        ...

    def queue_counts(self) -> Sequence[Mapping[str, float]]:
        """What it shows of each queue: the same gauges for all of them."""
        ...

    def lacking_quota(self) -> Sequence[Request]:
        """Return those whom only their queue's quota kept from being offered the last time."""
        ...
