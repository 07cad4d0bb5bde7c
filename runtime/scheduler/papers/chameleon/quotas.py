"""Divides the tokens that fit the device into quotas of queues. Pure.

Source: Chameleon, section 4.2 (Assigning Quotas per Queue). In the paper a quota may be smaller
than one request (S · D · (1/SLO + λ) with SLO = 5 D is a fraction of S), which then waits for ever.
All quotas together may exceed the memory, and the weights that divide the rest are not given.
"""

from collections.abc import Sequence
from dataclasses import dataclass


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
