"""Divides the tokens that fit the device into quotas of queues, and keeps their ledger. Pure.

Source: Chameleon, section 4.2 (Assigning Quotas per Queue). In the paper a quota may be smaller
than one request (S · D · (1/SLO + λ) with SLO = 5 D is a fraction of S), which then waits for ever.
All quotas together may exceed the memory, and the weights that divide the rest are not given.
Algorithm 1 does not record lenders, so that loans are spent twice.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ....plan import RequestId


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """Sizes, times and rate of the requests of a queue."""

    largest_tokens: int
    size_tokens: float  # S: their 99th percentile
    duration_s: float  # D: from admission to the end
    slo_s: float  # from arrival to the end; 0 = unknown
    rate_per_s: float  # lambda: arrivals

    @property
    def min_tokens(self) -> float:
        """Tok_min: tokens with which the queue, as an M/M/1 queue, keeps its SLO on average."""
        if not self.slo_s:
            return 0.0
        return self.size_tokens * self.duration_s * (1 / self.slo_s + self.rate_per_s)


@dataclass(frozen=True, slots=True)
class Quotas:
    """Tokens by queue."""

    tokens: tuple[int, ...]
    is_feasible: bool  # whether every queue can keep its SLO


def assign_quotas(loads: Sequence[QueueLoad], total: int, *, has_floor: bool) -> Quotas:
    """Divide ``total`` tokens in proportion to ``min_tokens`` of the queues.

    ``has_floor``: each quota is at least the largest request of its queue. The caller makes sure
    that these fit ``total`` together. A single queue gets everything.
    """
    floors = [load.largest_tokens if has_floor else 1 for load in loads]
    if len(loads) == 1:
        floors = [min(floors[0], total)]
    assert sum(floors) <= total, (floors, total)
    needs = [max(load.min_tokens, float(floor)) for load, floor in zip(loads, floors, strict=True)]
    shares = _shares(needs, floors, total)
    shares[-1] += total - sum(shares)
    return Quotas(tuple(shares), sum(needs) <= total)


def _shares(needs: Sequence[float], floors: Sequence[int], total: int) -> list[int]:
    """Scale all needs by one factor, but none to less than its floor."""
    shares = list(floors)
    free = set(range(len(needs)))
    while free:
        left = total - sum(floors[queue] for queue in range(len(needs)) if queue not in free)
        factor = left / sum(needs[queue] for queue in free)
        low = {queue for queue in free if needs[queue] * factor < floors[queue]}
        if not low:
            for queue in free:
                shares[queue] = max(floors[queue], int(needs[queue] * factor))
            break
        free -= low
    return shares


class QuotaLedger:
    """Tokens charged to requests, by the queues that they come from.

    Available + charged = quota for each queue. Charged tokens include loans to other queues.
    """

    def __init__(self, quotas: Sequence[int]) -> None:
        self.quotas = tuple(quotas)
        self.available = list(quotas)  # negative = overdrawn
        self._charged: dict[RequestId, Counter[int]] = {}  # [request][queue]

    @property
    def free_tokens(self) -> int:
        """Tokens that no request is charged."""
        return sum(self.available)

    def is_idle(self, queue: int) -> bool:
        """Whether the whole quota of the queue is available."""
        return self.available[queue] == self.quotas[queue]

    def spare(self, lenders: Sequence[int]) -> int:
        """Return the tokens that these queues can lend."""
        return sum(max(0, self.available[queue]) for queue in lenders)

    def charge(
        self,
        request_id: RequestId,
        queue: int,
        num_tokens: int,
        lenders: Sequence[int] = (),
        *,
        is_all_lent: bool = False,
    ) -> None:
        """Charge tokens to a request: from its own queue, then from lenders in proportion.

        If both have too few, the own queue is overdrawn. ``is_all_lent``: lenders come first.
        """
        spare = self.spare(lenders)
        own = 0 if is_all_lent else min(num_tokens, max(0, self.available[queue]))
        lent = min(num_tokens - own, spare)
        self._debit(request_id, queue, num_tokens - lent)
        for lender in lenders:
            available = max(0, self.available[lender])
            if available:
                share = -(-lent * available // spare)  # the last lender gives the rest
                self._debit(request_id, lender, share)
                lent -= share
                spare -= available

    def refund(self, request_id: RequestId) -> None:
        """Return all tokens of a request to the queues that they came from."""
        for queue, num_tokens in self._charged.pop(request_id).items():
            self.available[queue] += num_tokens

    def _debit(self, request_id: RequestId, queue: int, num_tokens: int) -> None:
        self._charged.setdefault(request_id, Counter())[queue] += num_tokens
        self.available[queue] -= num_tokens
