"""The order of events."""

import math

from corun.runtime.sim.cluster import Agenda


def taken(agenda: Agenda) -> list[tuple[float, int]]:
    found = []
    while (due := agenda.take()) is not None:
        found.append(due[:2])
    return found


def test_by_time_then_by_order_then_by_index() -> None:
    agenda, done = Agenda(), list[str]()
    agenda.add(2.0, 0, 0, lambda: done.append("later"))
    agenda.add(1.0, 1, 0, lambda: done.append("second order"))
    agenda.add(1.0, 0, 1, lambda: done.append("second index"))
    agenda.add(1.0, 0, 0, lambda: done.append("first"))
    while (due := agenda.take()) is not None:
        due[2]()
    assert done == ["first", "second index", "second order", "later"]


def test_what_is_expected_takes_the_place_of_what_was() -> None:
    agenda = Agenda()
    agenda.expect("turn", 0, (1.0, 0), lambda: None)
    agenda.expect("turn", 1, (1.5, 0), lambda: None)
    agenda.expect("copy", 0, (3.0, 0), lambda: None)
    agenda.expect("turn", 0, (2.0, 0), lambda: None)
    agenda.expect("turn", 1, (math.inf, 0), lambda: None)
    assert taken(agenda) == [(2.0, 0), (3.0, 0)]
    agenda.expect("turn", 0, (4.0, 0), lambda: None)
    assert taken(agenda) == [(4.0, 0)]
