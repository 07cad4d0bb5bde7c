"""What a scheduling policy decides: who is admitted next, and who gives way.

The scheduler does the mechanics (blocks, adapters, steps, results) and asks a policy for order.
A policy knows requests and time; it sees room on the device only through the verdicts on the
candidates it offers.
"""

import enum
from collections.abc import Collection, Generator, Sequence
from typing import Protocol

from ..request import Request


class Verdict(enum.Enum):
    """What came of a candidate for admission."""

    ADMITTED = "admitted"  # it runs; the policy no longer holds it
    LOADING = "loading"  # its adapter is on the way, with its bytes taken
    NO_MEMORY = "no_memory"  # blocks or adapter bytes are not free now


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

    def victim(self, running: Collection[Request]) -> Request:
        """Choose the running request that is preempted when memory runs out.

        For progress, repeated choices must never come upon the same request as long as there
        are others: one request has to be the last for every policy.
        """
        ...
