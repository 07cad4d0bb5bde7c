"""How the tokens that the device holds are shared out among queues. Pure.

Source: Chameleon, section 4.2 (Assigning Quotas per Queue). There a quota may be smaller than one
request (S · D · (1/SLO + λ) with SLO = 5 D is a fraction of S), which then waits for ever; all
quotas together may be more than there is; and what is left goes by weights that are not told.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What the requests of a queue need."""

    largest_tokens: int
    size_tokens: float  # S: what all but the largest need at most
    duration_s: float  # D: from admission to the end
    slo_s: float  # from arrival to the end; 0 = nothing is known of times
    rate_per_s: float  # lambda: arrivals

    @property
    def min_tokens(self) -> float:
        """Tok_min: with so many the queue, an M/M/1 queue, keeps its SLO on average."""
        if not self.slo_s:
            return 0.0
        return self.size_tokens * self.duration_s * (1 / self.slo_s + self.rate_per_s)


@dataclass(frozen=True, slots=True)
class Quotas:
    """Tokens by queue."""

    tokens: tuple[int, ...]
    is_feasible: bool  # whether every queue can keep its SLO


def assign_quotas(loads: Sequence[QueueLoad], total: int, *, has_floor: bool) -> Quotas:
    """Share ``total`` tokens out in proportion to what queues need at least.

    ``has_floor``: no queue gets less than its largest request. All these together are at most
    ``total``, unless there is but one queue, which gets everything.
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
    """Scale all needs by one factor, but for those that would fall below their floors."""
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
