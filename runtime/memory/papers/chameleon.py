"""Chameleon's score of adapters: frequency, recency and size (section 4.1). Pure."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ...errors import ConfigError
from ...policy_text import check_options
from ..policies.lru import LruPolicy
from ..policies.policy import MemoryFacts, MemoryItem, MemoryRules
from .item_table import ItemTable

_PRINTED_WEIGHTS = {"frequency": 0.45, "recency": 0.10, "size": 0.45}
_WINDOW_S = 300.0  # the paper's "specific time frame"; here the interval of its refreshes


class ChameleonMemoryPolicy:
    """Evicts KV of ended requests first, least recently used first, then adapters by score.

    The paper does not define how the three terms are scaled, and keeps no KV of ended requests.
    Here each is from 0 to 1 among the adapters on the device: visits of the last ``window_s`` over
    their maximum, 1 - age / largest age, bytes over the largest size. Ranking takes O(adapters),
    other calls O(log n).
    """

    def __init__(
        self, weights: Sequence[float] = tuple(_PRINTED_WEIGHTS.values()), window_s: float = _WINDOW_S
    ) -> None:
        """``weights``: of frequency, recency and size."""
        self.rules = MemoryRules()
        self._weights = weights
        self._window_s = window_s
        self._now_s = 0.0
        self._visits: deque[tuple[float, MemoryItem]] = deque()  # of the window, the oldest first
        self._adapters = ItemTable(("visits", "last_use_s", "bytes", "is_resident"))
        self._blocks = LruPolicy()

    def visit(self, item: MemoryItem, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        if not item.is_adapter:
            self._blocks.visit(item, now_s)
            return
        row = self._use(item)
        self._visits.append((self._now_s, item))
        self._adapters.columns["visits"][row] += 1.0
        while self._visits[0][0] < self._now_s - self._window_s:
            self._expire(self._visits.popleft()[1])

    def offer(self, item: MemoryItem) -> None:
        if not item.is_adapter:
            self._blocks.offer(item)
            return
        row = self._adapters.row(item)
        if row is None or not self._adapters.columns["is_resident"][row]:
            row = self._use(item)
        self._adapters.offer(row)

    def withdraw(self, item: MemoryItem) -> None:
        if not item.is_adapter:
            self._blocks.withdraw(item)
            return
        row = self._adapters.row(item)
        assert row is not None, item
        self._adapters.withdraw(row)

    def remove(self, item: MemoryItem) -> None:
        if not item.is_adapter:
            self._blocks.remove(item)
            return
        if self._adapters.is_offered(item):
            self.withdraw(item)
        row = self._adapters.row(item)
        if row is not None:
            self._adapters.columns["is_resident"][row] = 0.0
            self._drop_if_unknown(item, row)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        if not is_adapter:
            yield from self._blocks.victims()
        if is_adapter is False:
            return
        rows = self._adapters.offered_rows()
        if not len(rows):
            return
        columns = self._adapters.columns
        residents = np.flatnonzero(columns["is_resident"])
        ages_s = self._now_s - columns["last_use_s"]
        parts = (
            columns["visits"][rows] / max(1.0, columns["visits"][residents].max()),
            1.0 - ages_s[rows] / (ages_s[residents].max() or 1.0),
            columns["bytes"][rows] / max(1.0, columns["bytes"][residents].max()),
        )
        scores = sum(weight * part for weight, part in zip(self._weights, parts, strict=True))
        yield from self._adapters.lowest_first(rows, np.asarray(scores))

    def _use(self, item: MemoryItem) -> int:
        row = self._adapters.row(item)
        if row is None:
            row = self._adapters.add(item)
        columns = self._adapters.columns
        columns["last_use_s"][row] = self._now_s
        columns["bytes"][row] = item.num_bytes
        columns["is_resident"][row] = 1.0
        return row

    def _expire(self, item: MemoryItem) -> None:
        row = self._adapters.row(item)
        assert row is not None, item
        self._adapters.columns["visits"][row] -= 1.0
        self._drop_if_unknown(item, row)

    def _drop_if_unknown(self, item: MemoryItem, row: int) -> None:
        """Drop an adapter that is not on the device and has no visits in the window."""
        columns = self._adapters.columns
        if not columns["visits"][row] and not columns["is_resident"][row]:
            self._adapters.drop(item)


def chameleon_maker(
    options: Mapping[str, float], flag: str
) -> Callable[[MemoryFacts], ChameleonMemoryPolicy]:
    """Return what makes the policy with the weights ``frequency``, ``recency`` and ``size``.

    Raises ``ConfigError`` that names ``flag``.
    """
    check_options("chameleon", options, _PRINTED_WEIGHTS, flag)
    weights = tuple({**_PRINTED_WEIGHTS, **options}.values())
    if min(weights) < 0.0 or not sum(weights):
        wanted = "weights must be at least 0, and not all 0"
        raise ConfigError(f"{flag} chameleon has the weights {weights}; {wanted}")
    return lambda _: ChameleonMemoryPolicy(weights)
