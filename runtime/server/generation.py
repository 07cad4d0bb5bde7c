"""Runs the prompts of one HTTP request and merges what comes back.

Knows nothing of the shape of answers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from ..frontend.outputs import RequestOutput
from ..sampling import SamplingParams
from .engine_port import EnginePort
from .metrics import RequestTimer, ServerMetrics
from .responses import AdapterStartInfo, Timing, Usage

_ItemT = TypeVar("_ItemT")

_QUEUE_FACTOR = 2  # outputs that may wait per prompt before its generator is held back

Outputs = list[tuple[int, RequestOutput]]  # (index of the prompt, output), in order of arrival


@dataclass(frozen=True, slots=True)
class Generation:
    """What one HTTP request asks of the engine."""

    request_id: str
    prompts: Sequence[str | list[int]]
    sampling: SamplingParams
    adapter_name: str | None
    cache_salt: str = ""


def run(
    engine: EnginePort, generation: Generation, metrics: ServerMetrics
) -> AsyncGenerator[Outputs, None]:
    """Yield what is pending of all prompts, as often as there is something.

    Closing the generator aborts every prompt; so does the failure of one of them, which is raised.
    """
    if len(generation.prompts) == 1:
        return _run_one(engine, generation, 0, metrics)
    return _run_many(engine, generation, metrics)


async def _run_one(
    engine: EnginePort, generation: Generation, index: int, metrics: ServerMetrics
) -> AsyncGenerator[Outputs, None]:
    timer = RequestTimer(metrics)
    single = len(generation.prompts) == 1
    outputs = engine.generate(
        generation.prompts[index],
        generation.sampling,
        generation.request_id if single else f"{generation.request_id}-{index}",
        lora_request=generation.adapter_name,
        cache_salt=generation.cache_salt,
    )
    async with aclosing(outputs):
        async for output in outputs:
            timer.observe(output)
            yield [(index, output)]


async def _run_many(
    engine: EnginePort, generation: Generation, metrics: ServerMetrics
) -> AsyncGenerator[Outputs, None]:
    num_prompts = len(generation.prompts)
    queue: asyncio.Queue[Outputs | Exception | None] = asyncio.Queue(_QUEUE_FACTOR * num_prompts)

    async def pump(index: int) -> None:
        last: Exception | None = None
        try:
            async with aclosing(_run_one(engine, generation, index, metrics)) as outputs:
                async for output in outputs:
                    await queue.put(output)
        except Exception as exc:
            last = exc
        await queue.put(last)

    pumps = [asyncio.ensure_future(pump(index)) for index in range(num_prompts)]
    try:
        num_open = num_prompts
        while num_open:
            batch: Outputs = []
            for item in await _take_pending(queue):
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    batch += item
            if batch:
                yield batch
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _take_pending(queue: "asyncio.Queue[_ItemT]") -> list[_ItemT]:
    """Wait for one item, and take all others that are there."""
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items


class RequestCounter:
    """Counts the tokens of one HTTP request, and notes when they came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """The request has arrived now."""
        self._clock = clock
        self._started_s = clock()
        self._first_token_s: float | None = None
        self._latest: dict[int, RequestOutput] = {}  # by prompt
        self._num_generated = 0

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        """Take the next output of a prompt."""
        self._latest[prompt_index] = output
        if self._first_token_s is None:
            self._first_token_s = self._clock() - self._started_s
        for choice in output.outputs:
            self._num_generated += len(choice.new_token_ids)

    def usage(self) -> Usage:
        """Return the counts so far."""
        num_prompt = sum(len(output.prompt_token_ids) for output in self._latest.values())
        return Usage(num_prompt, self._num_generated, num_prompt + self._num_generated)

    def timing(self) -> Timing:
        """Return the times so far."""
        total_s = self._clock() - self._started_s
        first_s = total_s if self._first_token_s is None else self._first_token_s
        starts = [
            None
            if choice.adapter_start is None
            else AdapterStartInfo(choice.adapter_start.strategy, choice.adapter_start.reason)
            for _, output in sorted(self._latest.items(), key=lambda item: item[0])
            for choice in output.outputs
        ]
        return Timing(first_s, total_s, starts)
