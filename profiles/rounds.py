"""Repeats measurements in turn within a time budget. Pure: the clock is passed in.

All cases are measured once, then all again in reverse order, and so on, so that drift, such as that
of a core's clock rate, affects all cases alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .curve import median

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Case(Generic[Value]):
    """A measurement to repeat."""

    name: str
    measure: Callable[[], Value]


@dataclass(frozen=True, slots=True)
class Repeats:
    """The number of rounds, and their time limit."""

    budget_s: float
    min_rounds: int  # after a warm-up round; cases that do not fit this often are left out
    max_rounds: int

    def scaled(self, share: float) -> "Repeats":
        """Return ``share`` of the time, and of the most rounds if that is more."""
        max_rounds = round(self.max_rounds * max(share, 1.0))
        return Repeats(share * self.budget_s, self.min_rounds, max_rounds)


@dataclass(frozen=True, slots=True)
class CaseTimes(Generic[Value]):
    """Values by case, as many for each; and the names of cases that were left out."""

    values: dict[str, list[Value]]
    left_out: tuple[str, ...]


Progress = Callable[[int, int], None]  # measurements done, and their total


def measure_rounds(
    cases: Sequence[Case[Value]],
    repeats: Repeats,
    *,
    num_needed: int,
    clock: Callable[[], float],
    on_progress: Progress,
) -> CaseTimes[Value]:
    """Measure ``cases``, which are in the order of their cost.

    The first round is a warm-up and does not count. Cases from the first one on that would exceed
    the budget are left out, but never one of the first ``num_needed``. Each remaining case has at
    least ``min_rounds`` values, even if that exceeds the budget.
    """
    start_s = clock()
    kept: list[Case[Value]] = []
    rounds = repeats.min_rounds + 1
    last_s = 0.0
    for case in cases:
        begin_s = clock()
        # A case costs at least as much as the one before it.
        expected_s = begin_s - start_s + last_s
        if len(kept) >= num_needed and expected_s * rounds > repeats.budget_s:
            break
        case.measure()
        last_s = clock() - begin_s
        kept.append(case)
        on_progress(len(kept), len(cases) * (repeats.max_rounds + 1))
    round_s = clock() - start_s
    values: dict[str, list[Value]] = {case.name: [] for case in kept}
    for number in range(repeats.max_rounds):
        if number >= repeats.min_rounds and clock() - start_s + round_s > repeats.budget_s:
            break
        for index, case in enumerate(kept if number % 2 else reversed(kept)):
            values[case.name].append(case.measure())
            on_progress((number + 1) * len(kept) + index + 1, len(kept) * (repeats.max_rounds + 1))
    return CaseTimes(values, tuple(case.name for case in cases[len(kept) :]))


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    """The median of each case."""
    return {name: median(repeated) for name, repeated in values.items()}
