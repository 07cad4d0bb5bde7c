"""Exploring finds what is wrong, and nothing else: against a second opinion, and by limits."""

import pytest
from corun.gpu.device.base import DeviceError
from hypothesis import given, settings
from support.streams.symbolic import Recording, SymbolicDevice
from support.streams.symbolic_explore import Exploration, explore
from support.streams.symbolic_findings import (
    ExplorationLimitError,
    HangInOneQueue,
    Overlap,
    ProtocolError,
    ReadBeforeWrite,
    UseAfterHandOn,
)
from support.streams.symbolic_program import Buffer
from support.streams.symbolic_programs import choosers, is_ordered, small_programs, write_down
from support.streams.symbolic_run import Choices, Priorities, run

X, Y = Buffer("x"), Buffer("y")
DRAWN = settings(derandomize=True, deadline=None, database=None, max_examples=150)


def nothing() -> None:
    """A computation that enqueues nothing."""


def _is_right(explored: Exploration) -> bool:
    return not explored.errors


@DRAWN
@given(small_programs())
def test_a_program_is_right_if_all_conflicts_are_in_one_order(calls: list[tuple[str, int, int]]) -> None:
    recording = Recording(lambda device: write_down(device, calls))
    explored = explore(recording)
    if explored.kinds != {HangInOneQueue}:  # about hardware queues, not about order
        assert _is_right(explored) == is_ordered(recording.program())


@DRAWN
@given(small_programs())
def test_the_reduction_hides_nothing(calls: list[tuple[str, int, int]]) -> None:
    recording = Recording(lambda device: write_down(device, calls))
    reduced, full = explore(recording), explore(recording, is_reduced=False)
    assert _is_right(reduced) == _is_right(full)
    assert reduced.kinds <= full.kinds
    assert reduced.num_states <= full.num_states


@settings(DRAWN, max_examples=50)
@given(small_programs(), choosers(num_agents=4, num_steps=40))
def test_one_order_finds_nothing_that_all_orders_do_not(
    calls: list[tuple[str, int, int]], chooser: Priorities | Choices
) -> None:
    recording = Recording(lambda device: write_down(device, calls))
    try:
        schedule = run(recording, chooser)
    except ProtocolError as error:
        assert type(error.finding) in explore(recording, is_reduced=False).kinds
    else:
        assert schedule


def _two_streams(device: SymbolicDevice) -> None:
    first, second = device.stream("first"), device.stream("second")
    device.launch(first, nothing, writes=[X])
    device.launch(second, nothing, writes=[Y])


def test_all_orders_of_two_streams_are_counted() -> None:
    """Two accesses of a begin and an end each: 4 steps, 2 of either stream, in any order."""
    explored = explore(Recording(_two_streams), is_reduced=False)
    explored.check()
    # What the host has issued is in the order, too: 2 steps of its own for each of the accesses.
    assert explored.num_orders == _count_orders()
    assert explore(Recording(_two_streams)).num_orders == 1


def _count_orders() -> int:
    """Interleavings of h1 h2 h3 h4, a1 a2, b1 b2 with a1 after h1, a2 after h2, b1 after h3..."""
    limits = {"h": 4, "a": 2, "b": 2}

    def count(done: dict[str, int]) -> int:
        if done == limits:
            return 1
        total = 0
        for agent, limit in limits.items():
            issued = {"h": 4, "a": done["h"], "b": done["h"] - 2}[agent]
            if done[agent] < min(limit, issued):
                total += count({**done, agent: done[agent] + 1})
        return total

    return count({"h": 0, "a": 0, "b": 0})


def test_too_many_states_are_not_cut_off_silently() -> None:
    with pytest.raises(ExplorationLimitError, match="more than 5 states"):
        explore(Recording(_two_streams), max_states=5, is_reduced=False)


def test_too_many_questions_are_not_cut_off_silently() -> None:
    def host(device: SymbolicDevice) -> None:
        stream = device.stream("stream")
        event = device.event()
        device.record(stream, event)
        while not device.is_done(event):
            pass

    with pytest.raises(ExplorationLimitError, match="more than 64 questions"):
        explore(Recording(host))


def test_the_shortest_order_is_shown() -> None:
    def host(device: SymbolicDevice) -> None:
        writer, reader, other = (device.stream(name) for name in ("writer", "reader", "other"))
        device.launch(other, nothing, writes=[Y])
        device.launch(writer, nothing, writes=[X])
        device.launch(reader, nothing, reads=[X])

    explored = explore(Recording(host), is_reduced=False)
    assert explored.kinds == {ReadBeforeWrite, Overlap}
    with pytest.raises(ProtocolError) as caught:
        explored.check()
    assert isinstance(caught.value.finding, ReadBeforeWrite)
    assert caught.value.schedule == ("reader begins launch #2 (x -> nothing)",)
    (overlap,) = (error for error in explored.errors if isinstance(error.finding, Overlap))
    assert overlap.schedule == (
        "writer begins launch #1 (nothing -> x)",
        "reader begins launch #2 (x -> nothing)",
    )


def _load_and_evict(device: SymbolicDevice, *, is_careful: bool) -> None:
    """Give a page back when its load is done, or else when an answer says so."""
    load = device.stream("load")
    device.host.compute(writes=[X])
    page, event = device.lease("page"), device.event()
    device.copy(load, page, X)
    device.record(load, event)
    is_done = device.is_done(event)
    device.release_event(event)
    if is_done or not is_careful:
        device.give_back(page)
    else:
        device.give_back(page, load)
    device.close()


def test_both_answers_to_a_question_are_explored() -> None:
    asked = []

    def host(device: SymbolicDevice) -> None:
        _load_and_evict(device, is_careful=True)
        asked.append(device.program().num_answers)

    explore(Recording(host)).check()
    assert asked == [1, 1]  # once for each answer
    explored = explore(Recording(lambda device: _load_and_evict(device, is_careful=False)))
    assert explored.kinds == {UseAfterHandOn}


@pytest.mark.parametrize("wrong_answer", [False, True])
def test_what_follows_an_answer_is_not_mixed_up(wrong_answer: bool) -> None:
    """After ``synchronize``, all agents are at the same position for every answer."""

    def host(device: SymbolicDevice) -> None:
        load = device.stream("load")
        slot, event = device.lease("slot"), device.event()
        device.record(load, event)
        answer = device.is_done(event)
        device.synchronize(timeout_s=1)
        device.launch(load, nothing, writes=[slot])
        if answer != wrong_answer:
            device.synchronize(timeout_s=1)
        device.give_back(slot)

    assert explore(Recording(host)).kinds == {UseAfterHandOn}


def test_a_run_may_ask_too() -> None:
    def host(device: SymbolicDevice) -> None:
        _load_and_evict(device, is_careful=False)

    run(Recording(host), Priorities([1, 0]))
    with pytest.raises(ProtocolError) as caught:
        run(Recording(host), Priorities([0, 1]))
    assert isinstance(caught.value.finding, UseAfterHandOn)


def test_a_host_must_do_the_same_again() -> None:
    calls = []

    def host(device: SymbolicDevice) -> None:
        stream = device.stream("stream")
        calls.append(0)
        device.launch(stream, nothing, writes=[X] * len(calls))
        event = device.event()
        device.record(stream, event)
        device.is_done(event)

    with pytest.raises(DeviceError, match="something else when it is run again"):
        explore(Recording(host))
