"""How the order of a run is chosen."""

import pytest
from support.streams.symbolic import Recording, SymbolicDevice
from support.streams.symbolic_program import Buffer
from support.streams.symbolic_run import Choices, Priorities, run

X, Y = Buffer("x"), Buffer("y")


def test_priorities_decide_until_they_change() -> None:
    chooser = Priorities([2, 1, 0], change_at=[1])
    assert chooser([1, 2, 0]) == 2
    assert chooser([1, 2, 0]) == 1  # and 2 is last from here on
    assert chooser([2, 0]) == 0
    assert chooser([2]) == 2


def test_agents_without_a_priority_come_last() -> None:
    chooser = Priorities([0])
    assert chooser([3, 0]) == 0
    assert chooser([3]) == 3


def test_choices_are_by_number_and_then_the_first() -> None:
    chooser = Choices([4, 1])
    assert chooser([1, 2, 0]) == 2
    assert chooser([1, 2, 0]) == 2
    assert chooser([1, 2, 0]) == 1


def _two_streams(device: SymbolicDevice) -> None:
    first, second = device.stream("first"), device.stream("second")
    device.launch(first, lambda: None, writes=[X])
    device.launch(second, lambda: None, writes=[Y])


def test_the_order_is_shown() -> None:
    apart = ("first does launch #0 (nothing -> x)", "second does launch #1 (nothing -> y)")
    assert run(Recording(_two_streams), Priorities([1, 2, 0])) == apart
    assert run(Recording(_two_streams), Priorities([0, 2, 1])) == (apart[1], apart[0])
    # All is issued after 4 steps; then 1 begins, and is held up.
    assert run(Recording(_two_streams), Priorities([0, 1, 2], change_at=[5])) == (
        "first begins launch #0 (nothing -> x)",
        "second does launch #1 (nothing -> y)",
        "first ends launch #0 (nothing -> x)",
    )


def test_a_chooser_takes_one_that_can_go_on() -> None:
    with pytest.raises(AssertionError, match="cannot go on"):
        run(Recording(_two_streams), lambda _: 7)
