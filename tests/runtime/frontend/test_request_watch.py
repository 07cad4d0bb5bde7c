"""A request's watch is notified once of its end in the engine, for any end."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.client import ThreadClient
from corun.runtime.errors import CorunError, RequestError
from corun.runtime.frontend.async_engine import AsyncEngine
from corun.runtime.frontend.outputs import CompletionOutput, RequestOutput
from corun.runtime.sampling import SamplingParams
from support import fake_core

LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


class Watch:
    """Implements ``RequestWatch``."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.ends: list[RequestOutput] = []

    def opened(self) -> None:
        self.num_opened += 1

    def ended(self, output: RequestOutput) -> None:
        self.ends.append(output)

    @property
    def choices(self) -> list[CompletionOutput]:
        (end,) = self.ends
        assert (end.finished, self.num_opened) == (True, 1)
        assert all(not one.new_text and not one.new_token_ids for one in end.outputs)
        return end.outputs


@pytest.fixture
def run(tokenizer_dir: str) -> Callable[..., None]:
    """Runs a coroutine with an engine around it."""

    def run(test: Callable[[AsyncEngine], Awaitable[None]], **fields: Any) -> None:
        async def body() -> None:
            config = EngineConfig(model=tokenizer_dir, **fields)
            client = ThreadClient(config, factory=fake_core.FACTORY)
            async with AsyncEngine.from_client(client) as engine:
                await test(engine)

        asyncio.run(body())

    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(
    engine: AsyncEngine, watch: Watch, prompt: str, params: SamplingParams, name: str | None = None
) -> list[RequestOutput]:
    outputs = engine.generate(prompt, params, name, watch=watch)
    return [output async for output in outputs]


def has_ended(watch: Watch) -> bool:
    return bool(watch.ends)


def reasons(watch: Watch) -> list[str | None]:
    return [choice.finish_reason for choice in watch.choices]


def test_answers_that_end(run: Callable[..., None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        for params, reason in (
            (SamplingParams(max_tokens=9, n=2), "stop"),
            (SamplingParams(max_tokens=2, n=2), "length"),
            (SamplingParams(max_tokens=9, n=2, stop=("cd",)), "stop"),
        ):
            watch = Watch()
            outputs = await collect(engine, watch, "abcd", params)
            assert "".join(one.outputs[1].new_text for one in outputs) == outputs[-1].outputs[1].text
            await until(partial(has_ended, watch))
            assert reasons(watch) == [reason, reason]
            assert [one.num_tokens for one in watch.choices] == [
                len(one.token_ids) for one in outputs[-1].outputs
            ]

    run(test)


def test_a_request_that_is_left(run: Callable[..., None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        watch = Watch()
        async with aclosing(engine.generate("abc", LONG, watch=watch)) as outputs:
            async for output in outputs:
                seen = output.outputs[0].num_tokens
                break
        assert not watch.ends, "it has not ended in the engine"
        await until(lambda: bool(watch.ends))
        (choice,) = watch.choices
        assert choice.finish_reason == "abort"
        assert choice.num_tokens >= seen
        assert choice.timing is not None
        assert choice.timing.num_preemptions == 3

        watch = Watch()
        task = asyncio.create_task(collect(engine, watch, fake_core.SILENT, LONG))
        await until(lambda: engine.get_stats().num_running == 1)
        task.cancel()
        await until(lambda: bool(watch.ends))
        (choice,) = watch.choices
        assert (choice.finish_reason, choice.num_tokens) == ("abort", 0)
        assert choice.timing is not None
        assert choice.timing.parts == {"kv_memory": 0.5}

    run(test)


def test_a_choice_whose_stop_string_came_before_it_was_stopped(run: Callable[..., None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        watch = Watch()
        params = SamplingParams(max_tokens=4000, ignore_eos=True, stop=("cd",), n=2)
        await collect(engine, watch, "abcdef", params)
        await until(lambda: bool(watch.ends))
        assert reasons(watch) == ["stop", "stop"]
        for choice in watch.choices:
            assert choice.timing is not None
            assert choice.timing.num_preemptions == 3  # as in the engine's final update

    run(test)


def test_requests_that_fail_or_are_refused(run: Callable[..., None]) -> None:
    async def test(engine: AsyncEngine) -> None:
        watch = Watch()
        with pytest.raises(CorunError):
            await collect(engine, watch, fake_core.FAIL, SamplingParams(max_tokens=9, n=2))
        await until(lambda: bool(watch.ends))
        assert reasons(watch) == ["error", "error"]

        silent = Watch()
        task = asyncio.create_task(collect(engine, silent, fake_core.SILENT, LONG, "silent"))
        await until(lambda: engine.get_stats().num_running == 1)
        watch = Watch()
        with pytest.raises(RequestError, match="1 requests wait"):  # in the engine
            await collect(engine, watch, "x", LONG)
        await until(lambda: bool(watch.ends))
        assert reasons(watch) == ["error"]
        watch = Watch()
        with pytest.raises(RequestError, match="are open"):  # before it
            await collect(engine, watch, "x", SamplingParams(max_tokens=9, n=2))
        await engine.abort("silent")
        await task
        assert (watch.num_opened, watch.ends) == (0, [])
        assert reasons(silent) == ["abort"]

    run(test, max_num_seqs=1, max_num_waiting=1)


def test_an_engine_that_ends(run: Callable[..., None]) -> None:
    watches = [Watch() for _ in range(3)]

    async def test(engine: AsyncEngine) -> None:
        tasks = [
            asyncio.create_task(collect(engine, watch, fake_core.SILENT, LONG, f"{index}"))
            for index, watch in enumerate(watches)
        ]
        await until(lambda: engine.get_stats().num_running == 3)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        await engine.shutdown()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, BaseException) for result in results)

    run(test)
    assert [reasons(watch) for watch in watches] == [["abort"], ["error"], ["error"]]
