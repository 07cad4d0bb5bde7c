"""Time of adapters' products on the device against the adapters' bytes, with linear models."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ...gpu.forward.lower import PackedRows
from ..busy import relative_spread
from ..curve import median
from ..fit import fit_with_held_out
from ..profile import FitRecord
from ..rounds import Case, CaseTimes, Progress, Repeats, measure_rounds
from .bank import AdapterBank, draw_batches
from .effort import BATCH_SIZES
from .passes import Passes

_NUM_FITTED = 8  # points: two more than three terms need, and some to hold out


@dataclass(frozen=True, slots=True)
class LoraTimes:
    """Points with the plane through them."""

    record: FitRecord
    spreads: tuple[float, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Batch:
    name: str
    rows: PackedRows
    point: tuple[float, ...]


class LoraBench:
    """Batches over the adapters of one bank."""

    def __init__(self, passes: Passes, bank: AdapterBank) -> None:
        self._passes = passes
        self._bank = bank

    def decode(self, num_batches: int, repeats: Repeats, on_progress: Progress) -> LoraTimes:
        """Rows of one token, of mixed ranks: against the sum of their adapters' bytes.

        Source: Toppings, section 5 (batches of 4 to 32 requests); beyond its ranks up to 128.
        """
        rng = random.Random(0)  # noqa: S311 - the same batches on every machine
        drawn = draw_batches(self._bank.adapters, BATCH_SIZES, num_batches, rng)
        batches = [
            _Batch(
                f"a decode batch of {len(adapters)} rows, {number}",
                self._passes.decode_rows(
                    len(adapters), [a.table_row for a in adapters], [a.rank for a in adapters]
                ),
                (float(sum(adapter.num_bytes for adapter in adapters)),),
            )
            for number, adapters in enumerate(drawn)
        ]
        return self._measure(batches, repeats, on_progress)

    def prefill(
        self, tokens: Sequence[int], ranks: Sequence[int], repeats: Repeats, on_progress: Progress
    ) -> LoraTimes:
        """One row with one adapter: against tokens times its bytes, tokens, and its bytes."""
        adapters = [next(a for a in self._bank.adapters if a.rank == rank) for rank in ranks]
        batches = [
            _Batch(
                f"a prefill of {num_tokens} tokens with rank {adapter.rank}",
                self._passes.prefill_rows(num_tokens, adapter.table_row, adapter.rank),
                (float(num_tokens * adapter.num_bytes), float(num_tokens), float(adapter.num_bytes)),
            )
            for num_tokens in tokens
            for adapter in adapters
        ]
        return self._measure(batches, repeats, on_progress)

    def _measure(self, batches: Sequence[_Batch], repeats: Repeats, on_progress: Progress) -> LoraTimes:
        times: CaseTimes[float] = measure_rounds(
            [Case(batch.name, partial(self._products_s, batch.rows)) for batch in batches],
            repeats,
            num_needed=_NUM_FITTED,
            clock=time.perf_counter,
            on_progress=on_progress,
        )
        kept = [batch for batch in batches if batch.name in times.values]
        points = tuple(batch.point for batch in kept)
        y = tuple(median(times.values[batch.name]) for batch in kept)
        return LoraTimes(
            FitRecord(fit_with_held_out(points, y), points, y),
            tuple(relative_spread(values) for values in times.values.values()),
            times.left_out,
        )

    def _products_s(self, rows: PackedRows) -> float:
        """All layers, from those that the bank's adapters change."""
        spans = self._passes.lora_spans(rows)
        adapted = [span.add_s for span in spans if span.layer < self._bank.num_adapted_layers]
        return sum(adapted) * self._bank.scale
