"""Outputs handed to a function: as they arrive, merged while it waits, errors to the task."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from corun.runtime.engine.messages import RequestUpdate
from corun.runtime.errors import StepFailedError
from corun.runtime.frontend.delivery import Delivery, Take
from corun.runtime.frontend.generation import Generation
from corun.runtime.frontend.inputs import Asked
from corun.runtime.frontend.outputs import RequestOutput
from corun.runtime.frontend.request_table import RequestTable
from corun.runtime.frontend.tokenizer import Tokenizer
from corun.runtime.sampling import SamplingParams

TEXT = b"abcdef"


class Request:
    """One request with two choices whose engine the test plays."""

    def __init__(self, tokenizer: Tokenizer, take: Take) -> None:
        asked = Asked(
            request_id="one",
            prompt=None,
            prompt_token_ids=[97],
            params=SamplingParams(n=2),
            lora_request=None,
        )
        self.generation = Generation(asked, [1, 2], tokenizer)
        self._delivery = Delivery(take)
        self._table = RequestTable()
        self._table.add(self.generation, self._delivery.notify)
        self.end = asyncio.ensure_future(self._delivery.run(self.generation))

    def step(self, position: int, *, reason: str | None = None) -> None:
        """Have both choices get the next token, in one message."""
        self._table.take([RequestUpdate(key, (TEXT[position],), None, reason) for key in (1, 2)])


def texts(output: RequestOutput) -> list[str]:
    return [choice.new_text for choice in output.outputs]


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(bounded())


def test_outputs_are_handed_over_at_once(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        seen: list[list[str]] = []
        request = Request(tokenizer, lambda output: seen.append(texts(output)))
        for position in range(3):
            request.step(position)
            assert len(seen) == position + 1  # no task has run
        request.step(3, reason="length")
        assert seen == [["a"] * 2, ["b"] * 2, ["c"] * 2, ["d"] * 2]
        request.step(4)  # of a request that has ended
        await request.end
        assert len(seen) == 4

    run(body)


def test_what_comes_while_it_waits_is_merged(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        seen: list[list[str]] = []
        room = asyncio.Event()

        def take(output: RequestOutput) -> Awaitable[None] | None:
            seen.append(texts(output))
            return None if room.is_set() else wait()

        async def wait() -> None:
            await room.wait()

        request = Request(tokenizer, take)
        for position in range(4):
            request.step(position)
            await asyncio.sleep(0)
        assert seen == [["a"] * 2]
        room.set()
        while len(seen) < 2:
            await asyncio.sleep(0)
        assert seen[1] == ["bcd"] * 2
        request.step(4)  # at once again
        assert seen[2] == ["e"] * 2
        room.clear()
        request.step(5, reason="length")
        await asyncio.sleep(0)
        assert not request.end.done()  # the last one has not been taken in
        room.set()
        await request.end
        assert request.generation.has_ended

    run(body)


def test_an_error_comes_to_the_task(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        seen: list[list[str]] = []
        request = Request(tokenizer, lambda output: seen.append(texts(output)))
        request.step(0)
        request.step(1, reason="error")
        with pytest.raises(StepFailedError):
            await request.end
        assert seen == [["a"] * 2]

    run(body)


def test_what_the_function_raises_comes_to_the_task(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        num_calls = 0

        def take(output: RequestOutput) -> None:
            nonlocal num_calls
            num_calls += 1
            raise ZeroDivisionError("a bug in a consumer")

        request = Request(tokenizer, take)
        request.step(0)
        request.step(1)
        with pytest.raises(ZeroDivisionError):
            await request.end
        assert num_calls == 1

    run(body)


def test_the_output_is_what_a_new_one_would_be(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        last: list[RequestOutput] = []
        request = Request(tokenizer, last.append)
        request.step(0)
        request.step(1, reason="length")
        await request.end
        assert last[0] is last[1]
        fresh = request.generation.output()
        for told, new in zip(last[1].outputs, fresh.outputs, strict=True):
            assert (told.text, told.token_ids) == (new.text, new.token_ids) == ("ab", [97, 98])
            assert told.finish_reason == new.finish_reason == "length"
            assert (told.new_text, new.new_text) == ("b", "")

    run(body)
