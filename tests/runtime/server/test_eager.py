"""Awaitables begun outside of any task and ended in one."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from corun.runtime.server.eager import begin


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def test_what_waits_for_nothing_needs_no_task() -> None:
    seen = []

    async def work() -> None:
        seen.append(1)

    assert begin(work()) is None
    assert seen == [1]


def test_what_it_raises_at_once_is_raised() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        begin(work())


@pytest.mark.parametrize("first", ["event", "turn"])
def test_the_rest_goes_on_in_a_task(first: str) -> None:
    async def body() -> None:
        event = asyncio.Event()
        steps = []

        async def work() -> None:
            steps.append("begun")
            await (event.wait() if first == "event" else asyncio.sleep(0))
            steps.append("woken")
            await asyncio.sleep(0)
            steps.append("ended")

        rest = begin(work())
        assert rest is not None
        assert steps == ["begun"]
        asyncio.get_running_loop().call_soon(event.set)
        await rest
        assert steps == ["begun", "woken", "ended"]

    run(body)


def test_what_has_come_before_anybody_waits_is_seen() -> None:
    async def body() -> None:
        event = asyncio.Event()
        rest = begin(_wait(event, []))
        event.set()
        await asyncio.sleep(0)
        assert rest is not None
        await rest

    run(body)


def test_cancelling_the_task_ends_the_rest() -> None:
    async def body() -> None:
        closed: list[str] = []
        rest = begin(_wait(asyncio.Event(), closed))
        assert rest is not None
        task = asyncio.ensure_future(rest)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == ["closed"]

    run(body)


async def _wait(event: asyncio.Event, closed: list[str]) -> None:
    try:
        await event.wait()
    finally:
        closed.append("closed")
