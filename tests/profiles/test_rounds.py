"""Repeats in turn, and cases left out where time is short, on a clock that only cases move."""

from collections.abc import Callable

from corun.profiles.rounds import Case, CaseTimes, Repeats, measure_rounds
from support.fake_clock import FakeClock


def _measure(
    costs_s: dict[str, float], repeats: Repeats, num_needed: int = 1
) -> tuple[CaseTimes[float], list[str], list[tuple[int, int]]]:
    clock = FakeClock()
    order: list[str] = []
    progress: list[tuple[int, int]] = []

    def case(name: str, cost_s: float) -> Callable[[], float]:
        def measure() -> float:
            clock.sleep(cost_s)
            order.append(name)
            return cost_s

        return measure

    measured = measure_rounds(
        [Case(name, case(name, cost_s)) for name, cost_s in costs_s.items()],
        repeats,
        num_needed=num_needed,
        clock=clock,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    return measured, order, progress


def test_rounds_go_there_and_back_after_one_to_warm_up() -> None:
    measured, order, progress = _measure({"a": 1.0, "b": 2.0}, Repeats(100.0, 2, 3))
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert measured.values == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert measured.left_out == ()
    assert progress == [(n, 8) for n in range(1, 9)]


def test_the_budget_ends_the_rounds_but_not_before_the_least_number() -> None:
    measured, _, _ = _measure({"a": 1.0, "b": 1.0}, Repeats(9.0, 2, 50))
    assert len(measured.values["a"]) == 3  # 2 s to warm up, and 3 rounds of 2 s
    measured, _, _ = _measure({"a": 10.0}, Repeats(1.0, 2, 50))
    assert len(measured.values["a"]) == 2


def test_the_dearest_cases_are_left_out_where_time_is_short() -> None:
    costs_s = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}
    measured, order, _ = _measure(costs_s, Repeats(20.0, 2, 9))
    assert measured.left_out == ("d",)  # three rounds of 1 + 2 + 4 and at least 4 more do not fit
    assert "d" not in order
    assert all(len(values) >= 2 for values in measured.values.values())


def test_what_is_needed_is_measured_whatever_it_costs() -> None:
    measured, _, _ = _measure({"a": 5.0, "b": 9.0, "c": 9.0}, Repeats(1.0, 1, 9), num_needed=2)
    assert set(measured.values) == {"a", "b"}
    assert measured.left_out == ("c",)
