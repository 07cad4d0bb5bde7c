"""The base model: forwards and base products against tokens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..busy import relative_spread
from ..curve import Curve, median
from ..rounds import Case, Progress, Repeats, measure_rounds
from .passes import Passes


@dataclass(frozen=True, slots=True)
class BaseTimes:
    """Curves over tokens, seconds."""

    step_s: Curve  # the fastest, see ``StepBench.measure``
    base_s: tuple[Curve, ...]  # by input group, of one layer; medians, as the deltas beside them
    spreads: tuple[float, ...]
    left_out: tuple[str, ...]


def measure_prefill(
    passes: Passes, tokens: Sequence[int], repeats: Repeats, on_progress: Progress
) -> BaseTimes:
    """Measure prefills of one row, by number of tokens."""
    cases = [Case(str(n), partial(passes.sample, passes.prefill_rows(n))) for n in tokens]
    measured = measure_rounds(cases, repeats, num_needed=2, clock=time.perf_counter, on_progress=on_progress)
    steps = {int(name): [s.step_s for s in samples] for name, samples in measured.values.items()}
    num_groups = len(next(iter(measured.values.values()))[0].base_s)
    groups = [
        Curve.rising(
            {
                int(name): median([sample.base_s[group] for sample in samples])
                for name, samples in measured.values.items()
            }
        )
        for group in range(num_groups)
    ]
    return BaseTimes(
        Curve.rising({n: min(values) for n, values in steps.items()}),
        tuple(groups),
        tuple(relative_spread(values) for values in steps.values()),
        tuple(f"a prefill of {name} tokens" for name in measured.left_out),
    )
