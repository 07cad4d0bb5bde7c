"""Disturbed measurements are repeated."""

from collections.abc import Sequence

import pytest
from corun.profiles.busy import CpuUse
from replays import quiet
from replays.quiet import MAX_ATTEMPTS, measured_quietly


@pytest.mark.parametrize(
    ("foreign_cpus", "num_measured", "is_quiet"),
    [((0.0,), 1, True), ((0.5, 0.05), 2, True), ((0.5,) * MAX_ATTEMPTS, MAX_ATTEMPTS, False)],
)
def test_it_is_repeated_while_others_have_the_cpus(
    foreign_cpus: Sequence[float], num_measured: int, *, is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = [CpuUse(1.0, 1.0 + foreign, 0.0, 1.0) for foreign in foreign_cpus]
    calls: list[int] = []

    class Sampler:
        def __init__(self, cpus: Sequence[int]) -> None:
            assert cpus == (0, 1)
            self._num_before = len(calls)

        def use(self) -> CpuUse:
            if len(calls) == self._num_before:  # nothing was measured: a look before
                return CpuUse(1.0, 0.0, 0.0, 0.0)
            return uses[len(calls) - 1]

    monkeypatch.setattr(quiet, "CpuUseSampler", Sampler)
    monkeypatch.setattr(quiet, "LOOK_S", 0.0)

    def measure() -> int:
        calls.append(1)
        return len(calls)

    said: list[str] = []
    assert measured_quietly(measure, (0, 1), said.append) == (num_measured, is_quiet)
    assert len(said) == num_measured - is_quiet
