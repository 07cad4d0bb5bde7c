"""The memory watch reports readings while memory is short, and logs them."""

import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from corun.runtime.engine.memory_watch import MemoryWatch
from corun.runtime.memory.relief import MemoryRoom

_TIMEOUT_S = 20.0


class Looks:
    """The result of each check; a check waits until the test gives it."""

    def __init__(self) -> None:
        self.rooms: queue.SimpleQueue[tuple[int, int] | Exception] = queue.SimpleQueue()
        self.notified: queue.SimpleQueue[None] = queue.SimpleQueue()

    def read(self) -> tuple[int, int]:
        room = self.rooms.get(timeout=_TIMEOUT_S)
        if isinstance(room, Exception):
            raise room
        return room


@contextmanager
def watching(looks: Looks) -> Iterator[MemoryWatch]:
    watch = MemoryWatch(lambda: looks.notified.put(None), read=looks.read, interval_s=0.001)
    try:
        yield watch
    finally:
        looks.rooms.put(OSError("the test is over"))
        watch.close()
        watch.close()


def test_nothing_is_told_while_there_is_enough() -> None:
    looks = Looks()
    with watching(looks) as watch:
        looks.rooms.put((50, 100))
        looks.rooms.put((10, 100))
        looks.rooms.put((9, 100))
        looks.notified.get(timeout=_TIMEOUT_S)
        assert looks.notified.empty()
        assert watch.take() == MemoryRoom(9, 100)
        assert watch.take() is None


@pytest.mark.parametrize(("available", "num_looks"), [(50, 1), (20, 1), (19, 10), (5, 10)])
def test_looks_follow_each_other_faster_while_memory_is_nearly_short(
    available: int, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    wait = threading.Event.wait

    def note(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and threading.current_thread().name == "corun-memory-watch":
            waits.append(timeout)
        return wait(event, 0 if timeout is None else timeout * 1e-6)

    looks = Looks()
    for _ in range(3):
        looks.rooms.put((available, 100))
    looks.rooms.put(OSError("the test is over"))
    monkeypatch.setattr(threading.Event, "wait", note)
    watch = MemoryWatch(lambda: None, read=looks.read, interval_s=1.0)
    while not looks.rooms.empty():
        time.sleep(0.001)
    watch.close()
    assert waits[0] == 1.0
    assert set(waits[1:]) == {1.0 / num_looks}


def test_a_shortage_is_told_until_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="corun")
    looks = Looks()
    with watching(looks) as watch:
        for available in (5, 20, 6):
            looks.rooms.put((available, 100))
            looks.notified.get(timeout=_TIMEOUT_S)
            assert watch.take() == MemoryRoom(available, 100)
        watch.relieved()
        looks.rooms.put((20, 100))
        looks.rooms.put((5, 100))
        looks.notified.get(timeout=_TIMEOUT_S)
        assert watch.take() == MemoryRoom(5, 100)
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told[:3] == ["memory is short", "memory is no longer short", "memory is short"]
