"""Events of the CPU device, with threads in a rare order."""

import threading
import time

from corun.gpu.device.base import Event
from corun.gpu.device.cpu_stream import EventTable

LONG_S = 30.0


def recorded(table: EventTable) -> Event:
    event = table.take()
    table.begin_record(event)
    return event


def test_a_late_wake_up_for_an_earlier_generation_lets_nobody_go() -> None:
    """The thread that stored the first generation checks for sleepers when the second has one."""
    table = EventTable()
    first = recorded(table)
    slot = table.recorded(first)
    table.finish_record(slot, first.generation)
    table.release(first)
    second = recorded(table)
    assert second.index == first.index
    in_stream = threading.Thread(target=lambda: table.wait_in_stream(slot, second.generation))
    answers: list[bool] = []
    at_end = threading.Thread(target=lambda: answers.append(table.wait(second, LONG_S)))
    threads = (in_stream, at_end)
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + LONG_S
    for _ in range(3):
        while len(slot.waiters) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        blocked = list(slot.waiters)
        table.finish_record(slot, first.generation)
        while any(waiter in slot.waiters for waiter in blocked) or len(slot.waiters) < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
    assert answers == [] and all(thread.is_alive() for thread in threads)
    table.finish_record(slot, second.generation)
    for thread in threads:
        thread.join(LONG_S)
    assert answers == [True] and not in_stream.is_alive()


def test_a_slot_is_not_used_again_before_its_record_is_done() -> None:
    table = EventTable()
    first = recorded(table)
    slot = table.recorded(first)
    table.release(first)
    assert table.take().index != first.index
    table.finish_record(slot, first.generation)
    assert table.take().index == first.index


def test_a_wait_that_gives_up_leaves_no_trace() -> None:
    table = EventTable()
    event = recorded(table)
    assert not table.wait(event, 0.001)
    assert table.recorded(event).waiters == []
