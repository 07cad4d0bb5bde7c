"""Times of the parts of a pass, on a stopwatch that counts marks."""

from collections.abc import Hashable, Sequence

import torch
from corun.profiles.measure.stopwatch import GroupSpan, GroupTimer


class _Counter:
    """Every mark is later than the one before by its number."""

    def __init__(self) -> None:
        self.num_marks = 0
        self.is_settled = False

    def mark(self) -> float:
        self.num_marks += 1
        return float(self.num_marks * (self.num_marks + 1) // 2)

    def synchronize(self) -> None:
        self.is_settled = True

    def between_s(self, first: float, then: float) -> float:
        assert self.is_settled
        return then - first


class _Inner:
    """Records its calls."""

    is_repeatable = False
    has_factors = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, Hashable]] = []

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        self.calls.append(("begin", group))

    def add(
        self, group: Hashable, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int]
    ) -> None:
        self.calls.append(("add", group))


def test_begin_base_and_add_are_told_apart() -> None:
    inner = _Inner()
    timer = GroupTimer(_Counter(), inner)
    x = torch.zeros(1)
    for group in ((0, 0), (0, 1)):
        timer.begin(group, x)
        timer.add(group, x, [], [])
    assert timer.spans() == (
        GroupSpan(0, 0, begin_s=2.0, base_s=3.0, add_s=4.0),
        GroupSpan(0, 1, begin_s=6.0, base_s=7.0, add_s=8.0),
    )
    assert inner.calls == [("begin", (0, 0)), ("add", (0, 0)), ("begin", (0, 1)), ("add", (0, 1))]


def test_without_anything_inside_it_only_marks() -> None:
    timer = GroupTimer(_Counter(), None)
    x = torch.zeros(1)
    timer.begin((3, 1), x)
    timer.add((3, 1), x, [], [])
    (span,) = timer.spans()
    assert (span.layer, span.group) == (3, 1)
