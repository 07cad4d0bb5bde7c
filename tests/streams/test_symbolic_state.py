"""What steps do and refuse, one small program per kind of finding."""

from collections.abc import Callable

import pytest
from support.streams.symbolic import Recording, SymbolicDevice
from support.streams.symbolic_explore import Exploration, explore
from support.streams.symbolic_findings import (
    Hang,
    HangInOneQueue,
    MissingRelease,
    Overlap,
    OverwriteBeforeRead,
    ProtocolError,
    ReadBeforeWrite,
    ReadOfVoid,
    SignalBackwards,
    SlotInUse,
    TwoWriters,
    UseAfterHandOn,
    WordBetweenStreams,
    WriteOutOfOrder,
)
from support.streams.symbolic_program import Buffer
from support.streams.symbolic_run import Choices, run

X, Y = Buffer("x"), Buffer("y")


def nothing() -> None:
    """A computation that enqueues nothing."""


def explored(host: Callable[[SymbolicDevice], None]) -> Exploration:
    """With every order, so that the shortest ones are shown; fewer find the same."""
    found = explore(Recording(host), is_reduced=False)
    assert explore(Recording(host)).kinds == found.kinds
    return found


def test_nothing_has_written_what_is_read() -> None:
    def host(device: SymbolicDevice) -> None:
        device.copy(device.stream("stream"), Y, X)

    (error,) = explored(host).errors
    assert str(error) == (
        "ReadBeforeWrite: stream's copy #0 (x -> y): nothing has written x\n  stream begins copy #0 (x -> y)"
    )


def test_a_write_overtakes_a_read() -> None:
    def host(device: SymbolicDevice) -> None:
        reader, writer = device.stream("reader"), device.stream("writer")
        device.host.compute(writes=[X])
        device.copy(reader, Y, X)
        device.launch(writer, nothing, writes=[X])

    assert explored(host).kinds == {OverwriteBeforeRead, Overlap}


def test_a_write_begins_while_a_read_is_on() -> None:
    def host(device: SymbolicDevice) -> None:
        stream, worker, begun = device.stream("s"), device.process("w"), device.word("begun")
        worker.wait(begun, 1)
        worker.compute(writes=[X])
        device.host.compute(writes=[X])
        device.launch(stream, lambda: device.signal(stream, begun, 1), reads=[X])

    (error,) = explored(host).errors
    assert isinstance(error.finding, Overlap)
    assert (error.finding.access.agent, error.finding.other.agent) == ("w", "s")


def test_writes_come_in_either_order() -> None:
    def host(device: SymbolicDevice) -> None:
        for name in ("first", "second"):
            device.process(name).compute(writes=[X])

    found = explored(host)
    assert found.kinds == {WriteOutOfOrder, Overlap}
    (error,) = (error for error in found.errors if isinstance(error.finding, WriteOutOfOrder))
    assert str(error.finding) == (
        "x is written out of order: second's compute #1 (nothing -> x) is meant to replace "
        "first's compute #0 (nothing -> x) and replaces nothing"
    )


def test_reads_may_overlap() -> None:
    def host(device: SymbolicDevice) -> None:
        streams = [device.stream("first"), device.stream("second")]
        device.host.compute(writes=[X])
        for stream in streams:
            device.launch(stream, nothing, reads=[X])

    explored(host).check()


def test_a_launch_may_enqueue_what_touches_its_buffers() -> None:
    def host(device: SymbolicDevice) -> None:
        stream, worker = device.stream("stream"), device.process("worker")
        ready, done = device.word("ready"), device.word("done")
        worker.wait(ready, 1)
        worker.compute(reads=[Y])
        worker.signal(done, 1)

        def compute() -> None:
            device.copy(stream, Y, X)
            device.signal(stream, ready, 1)
            device.wait(stream, done, 1)

        device.launch(stream, nothing, writes=[X])
        device.launch(stream, compute, reads=[X], writes=[X])

    explored(host).check()


def test_what_a_launch_writes_is_there_at_its_end() -> None:
    def host(device: SymbolicDevice) -> None:
        stream, worker = device.stream("stream"), device.process("worker")
        ready = device.word("ready")
        worker.wait(ready, 1)
        worker.compute(reads=[X])
        device.launch(stream, lambda: device.signal(stream, ready, 1), writes=[X])

    assert explored(host).kinds == {Overlap}


@pytest.mark.parametrize("value", [3, 2**31 - 1])
def test_words_are_compared_cyclically(value: int) -> None:
    def host(device: SymbolicDevice) -> None:
        word, worker = device.word("word", initial=value - 1), device.process("worker")
        worker.wait(word, value + 1)
        worker.compute(reads=[X])
        device.host.compute(writes=[X])
        device.host.signal(word, value)
        device.host.signal(word, value + 2)

    explored(host).check()


def test_a_word_goes_forward() -> None:
    def host(device: SymbolicDevice) -> None:
        word = device.word("word", initial=2**31 - 1)
        device.host.signal(word, -(2**31))
        device.host.signal(word, 2**31 - 1)

    (error,) = explored(host).errors
    assert error.finding == SignalBackwards("host", "word", 2**31 - 1, -(2**31))


def test_a_word_has_one_writer() -> None:
    def host(device: SymbolicDevice) -> None:
        word = device.word("word")
        device.signal(device.stream("stream"), word, 1)
        device.process("worker").signal(word, 2)

    (error,) = explored(host).errors
    assert error.finding == TwoWriters("word", ("stream", "worker"))


def test_streams_do_not_wait_for_each_other_by_words() -> None:
    def host(device: SymbolicDevice) -> None:
        first, second, word = device.stream("first"), device.stream("second"), device.word("word")
        device.signal(first, word, 1)
        device.wait(first, word, 1)
        device.wait(second, word, 1)

    (error,) = explored(host).errors
    assert error.finding == WordBetweenStreams("word", "first", "second")


def test_everybody_who_hangs_is_named() -> None:
    def host(device: SymbolicDevice) -> None:
        first, second = device.stream("first"), device.stream("second")
        ready, done, event = device.word("ready"), device.word("done"), device.event()
        worker = device.process("worker")
        worker.wait(ready, 1)
        worker.signal(done, 1)
        device.wait(first, done, 1)
        device.signal(first, ready, 1)
        device.record(first, event)
        device.wait_event(second, event)
        device.synchronize(second, timeout_s=1)
        device.launch(second, nothing, writes=[X])

    (error,) = explored(host).errors
    assert error.finding == Hang(
        (
            ("host", "synchronizes with agents 2"),
            ("first", "waits for done >= 1"),
            ("second", "waits for event 0.1"),
            ("worker", "waits for ready >= 1"),
        )
    )


def test_a_stream_is_held_up_by_another_one_in_its_queue() -> None:
    def host(device: SymbolicDevice) -> None:
        held, free, word = device.stream("held"), device.stream("free"), device.word("word")
        device.wait(held, word, 1)
        device.launch(free, nothing, writes=[X])
        device.synchronize(free, timeout_s=1)
        device.host.signal(word, 1)

    (error,) = explored(host).errors
    assert error.finding == HangInOneQueue(
        (("host", "synchronizes with agents 3"), ("the one queue", "waits for word >= 1"))
    )


def test_a_slot_is_used_by_its_owner_only() -> None:
    def host(device: SymbolicDevice) -> None:
        stream = device.stream("stream")
        slot = device.lease("slot")
        device.launch(stream, nothing, writes=[slot])
        device.give_back(slot)
        device.lease("slot")

    found = explored(host)
    assert found.kinds == {UseAfterHandOn}
    assert str(found.errors[0].finding).endswith("uses slot by lease 1, but it is nobody's")
    with pytest.raises(ProtocolError, match="uses slot by lease 1, but it is of lease 2"):
        run(Recording(host), Choices([-1] * 9))


def test_a_slot_may_be_handed_on_in_the_order_of_a_stream() -> None:
    def host(device: SymbolicDevice) -> None:
        stream = device.stream("stream")
        for _ in range(3):
            slot = device.lease("slot", stream)
            device.launch(stream, nothing, writes=[slot])
            device.launch(stream, nothing, reads=[slot])
            device.give_back(slot, stream)
        device.close()

    explored(host).check()


def test_what_the_owner_before_wrote_is_not_there() -> None:
    def host(device: SymbolicDevice) -> None:
        slot = device.lease("slot")
        device.host.compute(writes=[slot])
        device.give_back(slot)
        device.host.compute(reads=[device.lease("slot")])

    (error,) = explored(host).errors
    assert isinstance(error.finding, ReadBeforeWrite)


def test_a_slot_is_taken_after_a_stream_has_given_it_back() -> None:
    def host(device: SymbolicDevice) -> None:
        stream = device.stream("stream")
        device.give_back(device.lease("slot"), stream)
        device.lease("slot")

    found = explored(host)
    assert found.errors[0].finding == SlotInUse("host", "slot", 2, 1)
    # It is then given back by a former owner.
    assert found.kinds == {SlotInUse}


def test_what_is_held_at_the_end_is_named() -> None:
    def host(device: SymbolicDevice) -> None:
        device.lease("slot")
        device.event()
        device.close()

    (error,) = explored(host).errors
    assert error.finding == MissingRelease(("slot (lease 1)", "event 0.1"))


def _lose_worker(device: SymbolicDevice, *, is_reliant: bool) -> None:
    """A stream waits for a worker that dies; the host releases it and starts again."""
    stream, other = device.stream("stream"), device.stream("other")
    ready, done, event = device.word("ready"), device.word("done"), device.event()
    device.host.compute(writes=[X])
    device.signal(stream, ready, 1)
    device.wait(stream, done, 1)
    device.launch(stream, nothing, reads=[X], writes=[Y])
    device.record(stream, event)
    device.wait_event(other, event)
    device.launch(other, nothing, reads=[Y], writes=[Buffer("z")])
    device.release_waits()
    device.synchronize(timeout_s=1)
    device.release_event(event)
    if not is_reliant:
        device.launch(stream, nothing, reads=[X], writes=[Y])
    device.launch(stream, nothing, reads=[Y])
    device.close()


def test_released_waits_let_streams_end_and_void_what_they_compute() -> None:
    explored(lambda device: _lose_worker(device, is_reliant=False)).check()
    found = explored(lambda device: _lose_worker(device, is_reliant=True))
    assert found.kinds == {ReadOfVoid}
    assert str(found.errors[0].finding).endswith("the contents of y are void")


def test_releasing_counts_words_and_leaves_reached_ones() -> None:
    counts = set()

    def host(device: SymbolicDevice) -> None:
        stream = device.stream("stream")
        lost, kept, worker = device.word("lost"), device.word("kept"), device.process("worker")
        worker.signal(kept, 1)
        device.wait(stream, lost, 1)
        device.wait(stream, lost, 2)
        device.wait(stream, kept, 1)
        counts.add(device.release_waits())

    explored(host).check()
    assert counts == {1, 2}  # whether the worker was in time


def test_a_late_signal_may_come_before_or_after_the_released_wait_passes() -> None:
    def host(device: SymbolicDevice) -> None:
        worker, stream = device.process("worker"), device.stream("stream")
        late, event = device.word("late"), device.event()
        worker.signal(late, 1)
        device.wait(stream, late, 1)
        device.launch(stream, nothing, writes=[X])
        device.record(stream, event)
        device.release_waits()
        device.synchronize(timeout_s=1)
        device.host.compute(reads=[X])

    assert explored(host).kinds == {ReadOfVoid}


def _retry(device: SymbolicDevice, *, num_jobs: int) -> None:
    """A released stream gives a worker void contents; a second job starts over."""
    stream, worker = device.stream("stream"), device.process("worker")
    lost, ready, done = device.word("lost"), device.word("ready"), device.word("done")
    device.wait(stream, lost, 1)
    for job in range(1, num_jobs + 1):
        worker.wait(ready, job)
        worker.compute(reads=[X], writes=[Y])
        worker.signal(done, job)
        device.launch(stream, nothing, writes=[X])
        device.signal(stream, ready, job)
        if job == 1:
            device.release_waits()
            device.synchronize(timeout_s=1)
        device.host.wait(done, job)
    device.host.compute(reads=[Y])


def test_a_process_is_void_until_its_next_job() -> None:
    explored(lambda device: _retry(device, num_jobs=2)).check()
    assert explored(lambda device: _retry(device, num_jobs=1)).kinds == {ReadOfVoid}
