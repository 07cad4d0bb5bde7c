"""Runs the prompts of one HTTP request and counts what comes back.

Knows nothing of the shape of answers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ..frontend.outputs import RequestOutput
from ..sampling import SamplingParams
from .engine_port import EnginePort
from .metrics import RequestTimer, ServerMetrics
from .responses import AdapterStartInfo, Timing, Usage

# Takes an output of the prompt with this index; what comes meanwhile is merged into the next.
TakeOutput = Callable[[int, RequestOutput], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Generation:
    """What one HTTP request asks of the engine."""

    request_id: str
    prompts: Sequence[str | list[int]]
    sampling: SamplingParams
    adapter_name: str | None
    cache_salt: str = ""


class PromptRun(RequestTimer):
    """One prompt of an HTTP request: its latest output, and when its outputs came."""

    __slots__ = ("latest",)

    def __init__(self, metrics: ServerMetrics) -> None:
        super().__init__(metrics)
        self.latest: RequestOutput | None = None


async def run(
    engine: EnginePort, generation: Generation, metrics: ServerMetrics, take: TakeOutput
) -> list[PromptRun]:
    """Have ``take`` take all outputs of all prompts, those of one prompt one after the other.

    Returns the prompts in their order when all have ended. Cancelling it aborts every prompt; so
    does the failure of one of them, which is raised.
    """
    runs = [PromptRun(metrics) for _ in generation.prompts]
    if len(runs) == 1:
        await _run_one(engine, generation, 0, runs[0], take)
        return runs
    tasks = [
        asyncio.ensure_future(_run_one(engine, generation, index, one, take))
        for index, one in enumerate(runs)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return runs


async def _run_one(
    engine: EnginePort, generation: Generation, index: int, prompt_run: PromptRun, take: TakeOutput
) -> None:
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
            prompt_run.observe(output)
            prompt_run.latest = output
            await take(index, output)


def final_outputs(runs: Sequence[PromptRun]) -> list[RequestOutput]:
    """Return the last output of every prompt; all have ended."""
    return [one.latest for one in runs if one.latest is not None]


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Return the token counts of one HTTP request, over its prompts' last outputs."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_generated = sum(choice.num_tokens for output in outputs for choice in output.outputs)
    return Usage(num_prompt, num_generated, num_prompt + num_generated)


def timing_of(runs: Sequence[PromptRun], now_s: float) -> Timing:
    """Return when things happened in one HTTP request that has ended ``now_s``."""
    total_s = now_s - runs[0].started_s
    first_s = min(
        (one.first_token_s for one in runs if one.first_token_s is not None), default=total_s
    )
    starts = [
        None
        if choice.adapter_start is None
        else AdapterStartInfo(choice.adapter_start.strategy, choice.adapter_start.reason)
        for output in final_outputs(runs)
        for choice in output.outputs
    ]
    return Timing(first_s, total_s, starts)
