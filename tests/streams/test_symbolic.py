"""The symbolic device refuses what every device refuses, and records its calls."""

import pytest
from corun.gpu.device.base import DeviceError, Stream, UnrecordedEventError
from support.streams.symbolic import Recording, SymbolicDevice
from support.streams.symbolic_program import (
    HOST,
    Begin,
    Buffer,
    End,
    GiveBack,
    Issue,
    Join,
    Record,
    Signal,
    Take,
    Wait,
    WaitEvent,
)

X, Y = Buffer("x"), Buffer("y")


def nothing() -> None:
    """A computation that enqueues nothing."""


def test_calls_are_written_down_in_order() -> None:
    device = SymbolicDevice()
    first, second = device.stream("first"), device.stream("second", is_urgent=True)
    word, event = device.word("word", initial=-1), device.event()
    device.launch(first, nothing, reads=[X], writes=[Y])
    device.signal(first, word, 2**31)
    device.record(first, event)
    device.wait_event(second, event)
    device.wait(first, word, 5)
    device.copy(second, Y, X)
    device.synchronize(second, timeout_s=1)
    program = device.program()
    host, *streams = program.agents
    assert [agent.name for agent in streams] == ["first", "second"]
    launch, copy = program.accesses
    assert streams[0].steps == (
        Begin(launch),
        End(launch),
        Signal("word", -(2**31)),
        Record(event),
        Wait("word", 5),
    )
    assert streams[1].steps == (WaitEvent(event), Begin(copy), End(copy))
    assert (copy.reads, copy.writes) == ((X,), (Y,))
    issued = [(step.agent, step.num_steps) for step in host.steps if isinstance(step, Issue)]
    assert issued == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (1, 5), (2, 3)]
    assert host.steps[-1] == Join(((2, 3),))
    assert program.initial_words == {"word": -1}


def test_a_launch_encloses_what_it_enqueues() -> None:
    device = SymbolicDevice()
    first, second = device.stream("first"), device.stream("second")
    word = device.word("word")
    device.launch(first, lambda: device.signal(first, word, 1), reads=[X])
    begin, signal, end = device.program().agents[1].steps
    assert (type(begin), type(signal), type(end)) == (Begin, Signal, End)
    with pytest.raises(DeviceError, match="on another stream, second"):
        device.launch(first, lambda: device.signal(second, word, 2))
    device.signal(second, word, 2)


def test_what_a_launch_raises_is_raised() -> None:
    device = SymbolicDevice()
    stream = device.stream("stream")

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.launch(stream, fail, writes=[X])
    assert [type(step) for step in device.program().agents[1].steps] == [Begin, End]


def test_a_failure_leaves_out_what_devices_leave_out() -> None:
    device = SymbolicDevice()
    failed, other = device.stream("failed"), device.stream("other")
    word, event, known = device.word("word"), device.event(), device.event()
    device.record(other, known)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.launch(failed, fail)
    device.launch(failed, fail)
    device.copy(failed, Y, X)
    device.wait(failed, word, 1)
    device.wait_event(failed, known)
    device.signal(failed, word, 1)
    device.record(failed, event)
    assert device.num_left_out == 4
    kinds = [type(step) for step in device.program().agents[1].steps]
    assert kinds == [Begin, End, Signal, Record]
    device.synchronize(other, timeout_s=1)
    with pytest.raises(DeviceError, match="stream failed: ValueError"):
        device.synchronize(timeout_s=1)
    device.synchronize(timeout_s=1)
    device.copy(failed, Y, X)
    assert device.num_left_out == 4


def test_a_failure_leaves_nothing_out_on_an_adopted_stream() -> None:
    device = SymbolicDevice()
    stream = device.stream("stream")
    device.adopt(stream)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.launch(stream, fail)
    device.copy(stream, Y, X)
    device.synchronize(timeout_s=1)
    assert [type(step) for step in device.program().agents[1].steps] == [Begin, End] * 2


def test_a_wait_needs_a_record_in_its_generation() -> None:
    device = SymbolicDevice()
    stream = device.stream("stream")
    event = device.event()
    with pytest.raises(UnrecordedEventError):
        device.wait_event(stream, event)
    device.record(stream, event)
    device.wait_event(stream, event)
    device.release_event(event)
    again = device.event()
    assert (again.index, again.generation) == (event.index, event.generation + 1)
    with pytest.raises(UnrecordedEventError):
        device.wait_event(stream, again)
    assert not device.is_done(again)


def test_events_are_refused_when_given_back_or_recorded_twice() -> None:
    device = SymbolicDevice()
    stream = device.stream("stream")
    event = device.event()
    device.record(stream, event)
    with pytest.raises(DeviceError, match="already recorded"):
        device.record(stream, event)
    device.release_event(event)
    for call in (
        lambda: device.record(stream, event),
        lambda: device.wait_event(stream, event),
        lambda: device.release_event(event),
        lambda: device.is_done(event),
    ):
        with pytest.raises(DeviceError, match="was released"):
            call()


def test_streams_come_first() -> None:
    device = SymbolicDevice()
    stream = device.stream("stream")
    with pytest.raises(DeviceError, match="an agent 'stream' already"):
        device.stream("stream")
    with pytest.raises(DeviceError, match="belongs to another device"):
        device.signal(Stream(1, "other"), device.word("word"), 1)
    device.launch(stream, nothing)
    with pytest.raises(DeviceError, match="after the first operation"):
        device.stream("late")


def test_slots_go_from_owner_to_owner() -> None:
    device = SymbolicDevice()
    stream = device.stream("stream")
    first = device.lease("slot")
    with pytest.raises(DeviceError, match="is not given back"):
        device.lease("slot")
    device.give_back(first, stream)
    with pytest.raises(DeviceError, match="is not held"):
        device.give_back(first)
    second = device.lease("slot", stream)
    assert (first, second) == (Buffer("slot", 1), Buffer("slot", 2))
    host, queue = device.program().agents
    assert host.steps[0] == Take("slot", 1)
    assert queue.steps == (GiveBack("slot", 1), Take("slot", 2))


def test_close_joins_and_refuses_everything_after() -> None:
    device = SymbolicDevice()
    stream = device.stream("stream")
    device.launch(stream, nothing, writes=[X])
    slot = device.lease("slot")
    device.event()
    device.close()
    device.close()
    program = device.program()
    assert program.is_closed
    assert program.held == ("slot (lease 1)", "event 0.1")
    assert program.agents[HOST].steps[-1] == Join(((1, 2),))
    for call in (device.event, lambda: device.copy(stream, X, Y), lambda: device.give_back(slot)):
        with pytest.raises(DeviceError, match="closed"):
            call()


def test_a_program_ends_at_the_first_question_without_an_answer() -> None:
    def host(device: SymbolicDevice) -> None:
        stream, event = device.stream("stream"), device.event()
        device.record(stream, event)
        try:
            device.is_done(event)
        except Exception:  # what the code under test might do
            device.launch(stream, nothing, writes=[Y])
        device.launch(stream, nothing, writes=[X])

    recording = Recording(host)
    asked, done = recording.program(), recording.program((1,))
    assert (asked.is_open, asked.accesses) == (True, [])
    assert (done.is_open, len(done.accesses)) == (False, 1)
    assert done.agents[HOST].steps[: len(asked.agents[HOST].steps)] == asked.agents[HOST].steps
