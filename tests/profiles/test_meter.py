"""The remaining seconds, on a clock that the test moves."""

from corun.profiles.meter import Meter, Report
from support.fake_clock import FakeClock


def test_what_is_left_shrinks_with_the_parts() -> None:
    clock = FakeClock()
    reports: list[Report] = []
    meter = Meter({"a": 10.0, "b": 5.0}, reports.append, clock)
    first = meter.begin("a", "this")
    clock.sleep(4.0)
    first(2, 8)
    clock.sleep(20.0)  # longer than it was to take
    first(7, 8)
    first(8, 8)
    second = meter.begin("b", "that")
    clock.sleep(1.0)
    second(1, 2)
    assert [(r.what, r.num_done, r.num_total, r.left_s) for r in reports] == [
        ("this", 0, 1, 15.0),
        ("this", 2, 8, 11.0),
        ("this", 7, 8, 5.0),
        ("this", 8, 8, 5.0),
        ("that", 0, 1, 5.0),
        ("that", 1, 2, 4.0),
    ]
    assert reports[1].text() == "this: 2/8, about 11 s left"
