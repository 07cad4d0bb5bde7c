"""Texts take turns by connection, wait in bounded number, and leave with their clients."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
from corun.runtime.errors import OverloadedError, RequestError
from corun.runtime.frontend.tokenizer import TextQueue, begin_flow

SHORT, LONG = 100, 100_000


class Clock:
    """A clock that only ``Work`` advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> Iterator[TextQueue]:
    queue = TextQueue(1000, clock)
    yield queue
    queue.close()


class Work:
    """Jobs that note their names when they run; those named "gate" wait until it opens."""

    def __init__(self, queue: TextQueue) -> None:
        self.queue = queue
        self.done: list[str] = []
        self.gate = threading.Event()

    async def run(self, name: str, num_chars: int, *, is_long: bool = False) -> str:
        def work() -> str:
            if name == "gate":
                assert self.gate.wait(20)
            self.done.append(name)
            return name

        return await self.queue.run(work, num_chars, is_long=is_long)


async def connection(work: Work, names: list[str], num_chars: int, is_long: bool = False) -> None:
    begin_flow()
    await asyncio.gather(*(work.run(name, num_chars, is_long=is_long) for name in names))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_connections_take_turns(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        gate = asyncio.ensure_future(connection(work, ["gate"], 1))
        await settle()
        many = asyncio.ensure_future(connection(work, ["a1", "a2", "a3", "a4"], 50))
        await settle()
        few = asyncio.ensure_future(connection(work, ["b1", "b2"], 50))
        await settle()
        work.gate.set()
        await asyncio.gather(gate, many, few)

    asyncio.run(run())
    assert work.done == ["gate", "a1", "b1", "a2", "b2", "a3", "a4"]


def test_a_short_text_overtakes_the_pieces_of_a_longer_one(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        gate = asyncio.ensure_future(connection(work, ["gate"], 1))
        await settle()
        large = asyncio.ensure_future(connection(work, ["l1", "l2", "l3"], 900))
        await settle()
        small = asyncio.ensure_future(connection(work, ["s"], 100))
        await settle()
        work.gate.set()
        await asyncio.gather(gate, large, small)

    asyncio.run(run())
    assert work.done == ["gate", "s", "l1", "l2", "l3"]


def test_short_texts_do_not_wait_for_long_ones(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        long = asyncio.ensure_future(work.run("gate", LONG, is_long=True))
        await settle()
        assert await asyncio.wait_for(work.run("short", SHORT), 20) == "short"
        assert not long.done()
        work.gate.set()
        await long

    asyncio.run(run())


def refusal(queue: TextQueue, num_waiting: int) -> OverloadedError:
    """The error of a text that would wait behind ``num_waiting`` characters."""
    with queue.admitted(num_waiting):  # one text is served in any case
        with pytest.raises(OverloadedError) as caught, queue.admitted(num_waiting):
            pass
        return caught.value


def test_what_waits_is_bounded(queue: TextQueue) -> None:
    error = refusal(queue, 5000)
    assert error.status == 429
    assert "5000 characters of other prompts" in str(error)
    assert "exceed 1000 (--max-waiting-chars)" in str(error)
    assert error.retry_after_s == 1
    with queue.admitted(400), queue.admitted(600):
        pass


def test_long_texts_do_not_shut_short_ones_out(queue: TextQueue) -> None:
    with queue.admitted(LONG), queue.admitted(SHORT):
        pass
    with queue.admitted(1000), queue.admitted(LONG):
        pass


def test_a_refusal_says_when_what_waits_is_done(queue: TextQueue, clock: Clock) -> None:
    def slow() -> None:
        clock.now_s += 1.0

    async def run() -> None:
        for _ in range(40):
            await queue.run(slow, 50_000, is_long=False)

    asyncio.run(run())
    assert refusal(queue, 500_000).retry_after_s in (10, 11)
    assert refusal(queue, 10**12).retry_after_s == 3600


def test_work_of_clients_that_have_left_is_dropped(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        gate = asyncio.ensure_future(work.run("gate", SHORT))
        await settle()
        left = asyncio.ensure_future(work.run("left", SHORT))
        await settle()
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        work.gate.set()
        await gate
        assert await work.run("next", SHORT) == "next"

    asyncio.run(run())
    assert work.done == ["gate", "next"]


def test_errors_pass_through(queue: TextQueue) -> None:
    def fails() -> None:
        raise ValueError("no")

    async def run() -> None:
        with pytest.raises(ValueError, match="no"):
            await queue.run(fails, SHORT, is_long=False)

    asyncio.run(run())


def test_the_event_loop_does_little_itself(queue: TextQueue) -> None:
    async def run() -> None:
        taken = [queue.takes_on_loop(4096) for _ in range(6)]
        assert taken == [True] * 4 + [False] * 2
        await settle()
        assert queue.takes_on_loop(4096)

    asyncio.run(run())


def test_closing_cancels_what_waits(queue: TextQueue) -> None:
    work = Work(queue)

    async def run() -> None:
        gate = asyncio.ensure_future(work.run("gate", SHORT))
        await settle()
        waiting = asyncio.ensure_future(work.run("never", SHORT))
        await settle()
        queue.close()
        queue.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        work.gate.set()
        await gate

    asyncio.run(run())
    assert work.done == ["gate"]


def test_a_text_that_fails_is_not_kept() -> None:
    class Text:
        pass

    def fail(text: Text) -> None:
        raise RequestError("refused")

    async def scene() -> None:
        queue = TextQueue(100)
        text = Text()
        kept = weakref.ref(text)
        work = partial(fail, text)
        with contextlib.suppress(RequestError):
            await queue.run(work, 1, is_long=False)
        del text, work
        while kept() is not None:  # the thread may not have returned yet
            await asyncio.sleep(0.01)
        queue.close()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scene(), 20))
    finally:
        gc.enable()
