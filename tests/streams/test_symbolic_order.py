"""One small program for each kind of finding, and right ones beside them."""

from collections.abc import Callable

import pytest
from corun.gpu.device.base import DeviceError
from support.streams.symbolic import Recording, SymbolicDevice
from support.streams.symbolic_order import Kind, ProtocolError, QuestionLimitError, check, findings, kinds
from support.streams.symbolic_program import Buffer

X, Y = Buffer("x"), Buffer("y")
Host = Callable[[SymbolicDevice], None]


def nothing() -> None:
    """A computation that enqueues nothing."""


def nothing_has_written_what_is_read(device: SymbolicDevice) -> None:
    device.copy(device.stream("stream"), Y, X)


def a_write_overtakes_a_read(device: SymbolicDevice) -> None:
    reader, writer = device.stream("reader"), device.stream("writer")
    device.host.compute(writes=[X])
    device.copy(reader, Y, X)
    device.launch(writer, nothing, writes=[X])


def a_write_begins_while_a_read_is_on(device: SymbolicDevice) -> None:
    stream, worker, begun = device.stream("s"), device.process("w"), device.word("begun")
    worker.wait(begun, 1)
    worker.compute(writes=[X])
    device.host.compute(writes=[X])
    device.launch(stream, lambda: device.signal(stream, begun, 1), reads=[X])


def writes_come_in_either_order(device: SymbolicDevice) -> None:
    for name in ("first", "second"):
        device.process(name).compute(writes=[X])


def what_a_launch_writes_is_read_before_its_end(device: SymbolicDevice) -> None:
    stream, worker, ready = device.stream("stream"), device.process("worker"), device.word("ready")
    worker.wait(ready, 1)
    worker.compute(reads=[X])
    device.host.compute(writes=[X])
    device.launch(stream, lambda: device.signal(stream, ready, 1), writes=[X])


def a_word_goes_back(device: SymbolicDevice) -> None:
    word = device.word("word", initial=2**31 - 1)
    device.host.signal(word, -(2**31))
    device.host.signal(word, 2**31 - 1)


def a_word_has_two_writers(device: SymbolicDevice) -> None:
    word = device.word("word")
    device.signal(device.stream("stream"), word, 1)
    device.process("worker").signal(word, 2)


def streams_wait_for_each_other_by_a_word(device: SymbolicDevice) -> None:
    first, second, word = device.stream("first"), device.stream("second"), device.word("word")
    device.signal(first, word, 1)
    device.wait(first, word, 1)
    device.wait(second, word, 1)


def all_wait(device: SymbolicDevice) -> None:
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


def a_stream_is_held_up_by_another_one_in_its_queue(device: SymbolicDevice) -> None:
    held, free, word = device.stream("held"), device.stream("free"), device.word("word")
    device.wait(held, word, 1)
    device.launch(free, nothing, writes=[X])
    device.synchronize(free, timeout_s=1)
    device.host.signal(word, 1)


def a_slot_is_handed_on_while_it_is_used(device: SymbolicDevice) -> None:
    stream = device.stream("stream")
    slot = device.lease("slot")
    device.launch(stream, nothing, writes=[slot])
    device.give_back(slot)
    device.lease("slot")


def a_slot_is_used_before_its_stream_takes_it(device: SymbolicDevice) -> None:
    slot = device.lease("slot", device.stream("stream"))
    device.host.compute(writes=[slot])


def a_slot_is_taken_before_a_stream_has_given_it_back(device: SymbolicDevice) -> None:
    device.give_back(device.lease("slot"), device.stream("stream"))
    device.lease("slot")


def what_the_owner_before_wrote_is_read(device: SymbolicDevice) -> None:
    slot = device.lease("slot")
    device.host.compute(writes=[slot])
    device.give_back(slot)
    device.host.compute(reads=[device.lease("slot")])


def leases_and_events_are_kept(device: SymbolicDevice) -> None:
    device.lease("slot")
    device.event()
    device.close()


WRONG: dict[Host, tuple[Kind, str]] = {
    nothing_has_written_what_is_read: (Kind.UNWRITTEN, "stream's copy #0 (x -> y): nothing has written x"),
    a_write_overtakes_a_read: (
        Kind.UNORDERED,
        "reader's copy #1 (x -> y) and writer's launch #2 (nothing -> x) are at x in either order",
    ),
    a_write_begins_while_a_read_is_on: (Kind.UNORDERED, "s's launch #2 (x -> nothing) and w's compute"),
    writes_come_in_either_order: (Kind.UNORDERED, "first's compute #0 (nothing -> x) and second's"),
    what_a_launch_writes_is_read_before_its_end: (Kind.UNORDERED, "are at x in either order"),
    a_word_goes_back: (Kind.SIGNAL_BACKWARDS, "host signals word = 2147483647 after -2147483648"),
    a_word_has_two_writers: (Kind.TWO_WRITERS, "word has several writers: stream, worker"),
    streams_wait_for_each_other_by_a_word: (
        Kind.WORD_BETWEEN_STREAMS,
        "second waits for first by word: take an event",
    ),
    all_wait: (
        Kind.HANG,
        "nothing releases: host synchronizes with agents 2; first waits for done >= 1; "
        "second waits for event 0.1; worker waits for ready >= 1",
    ),
    a_stream_is_held_up_by_another_one_in_its_queue: (
        Kind.HANG_IN_ONE_QUEUE,
        "nothing releases: host synchronizes with agents 3; the one queue waits for word >= 1",
    ),
    a_slot_is_handed_on_while_it_is_used: (
        Kind.USE_AFTER_HAND_ON,
        "stream's launch #0 (nothing -> slot (lease 1)): slot (lease 1) may be another owner's",
    ),
    a_slot_is_used_before_its_stream_takes_it: (Kind.USE_AFTER_HAND_ON, "slot (lease 1) may be"),
    a_slot_is_taken_before_a_stream_has_given_it_back: (Kind.SLOT_IN_USE, "slot (lease 2) may be taken"),
    what_the_owner_before_wrote_is_read: (Kind.UNWRITTEN, "nothing has written slot (lease 2)"),
    leases_and_events_are_kept: (Kind.MISSING_RELEASE, "still held at the end: slot (lease 1), event 0.1"),
}


@pytest.mark.parametrize("host", WRONG)
def test_what_is_wrong_is_named(host: Host) -> None:
    kind, text = WRONG[host]
    (found,) = findings(Recording(host))
    assert found.kind is kind
    assert text in found.what
    with pytest.raises(ProtocolError, match=f"^{kind.name}: "):
        check(Recording(host))


def reads_overlap(device: SymbolicDevice) -> None:
    streams = [device.stream("first"), device.stream("second")]
    device.host.compute(writes=[X])
    for stream in streams:
        device.launch(stream, nothing, reads=[X])


def a_launch_enqueues_what_touches_its_buffers(device: SymbolicDevice) -> None:
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


def a_slot_is_handed_on_in_the_order_of_a_stream(device: SymbolicDevice) -> None:
    stream = device.stream("stream")
    for _ in range(3):
        slot = device.lease("slot", stream)
        device.launch(stream, nothing, writes=[slot])
        device.launch(stream, nothing, reads=[slot])
        device.give_back(slot, stream)
    device.close()


def an_event_orders_streams(device: SymbolicDevice) -> None:
    writer, reader, event = device.stream("writer"), device.stream("reader"), device.event()
    device.launch(writer, nothing, writes=[X])
    device.record(writer, event)
    device.wait_event(reader, event)
    device.launch(reader, nothing, reads=[X])


@pytest.mark.parametrize(
    "host",
    [
        reads_overlap,
        a_launch_enqueues_what_touches_its_buffers,
        a_slot_is_handed_on_in_the_order_of_a_stream,
        an_event_orders_streams,
    ],
)
def test_what_is_right_is_found_right(host: Host) -> None:
    check(Recording(host))


@pytest.mark.parametrize("value", [3, 2**31 - 1])
def test_words_are_compared_cyclically(value: int) -> None:
    def host(device: SymbolicDevice) -> None:
        word, worker = device.word("word", initial=value - 1), device.process("worker")
        worker.wait(word, value + 1)
        worker.compute(reads=[X])
        device.host.compute(writes=[X])
        device.host.signal(word, value)
        device.host.signal(word, value + 2)

    check(Recording(host))


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


def test_both_answers_to_a_question_are_tried() -> None:
    check(Recording(lambda device: _load_and_evict(device, is_careful=True)))
    careless = Recording(lambda device: _load_and_evict(device, is_careful=False))
    assert kinds(careless) == {Kind.USE_AFTER_HAND_ON}


@pytest.mark.parametrize("wrong_answer", [False, True])
def test_each_answer_has_a_program(wrong_answer: bool) -> None:
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

    assert kinds(Recording(host)) == {Kind.USE_AFTER_HAND_ON}


@pytest.mark.parametrize(("is_joined", "answers"), [(True, {True}), (False, {True, False})])
def test_only_answers_that_can_be_given_are_tried(is_joined: bool, answers: set[bool]) -> None:
    given = set()

    def host(device: SymbolicDevice) -> None:
        stream, event = device.stream("stream"), device.event()
        device.record(stream, event)
        if is_joined:
            device.synchronize(timeout_s=1)
        given.add(device.is_done(event))

    check(Recording(host))
    assert given == answers


def test_too_many_questions_are_not_cut_off_silently() -> None:
    def host(device: SymbolicDevice) -> None:
        stream, event = device.stream("stream"), device.event()
        device.record(stream, event)
        while not device.is_done(event):
            pass

    with pytest.raises(QuestionLimitError, match="more than 64 questions"):
        check(Recording(host))


def test_a_host_must_do_the_same_again() -> None:
    calls = []

    def host(device: SymbolicDevice) -> None:
        stream, event = device.stream("stream"), device.event()
        calls.append(0)
        device.launch(stream, nothing, writes=[X] * len(calls))
        device.record(stream, event)
        device.is_done(event)

    with pytest.raises(DeviceError, match="something else when it is run again"):
        check(Recording(host))
