"""The demo's examples as requests, many at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from corun.runtime.demo import demo_model_path
from demo import tool_calls
from demo.tasks import TASKS, unseen_examples
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionChunk

from .serving import ANSWER_TIMEOUT_S

MAX_TOKENS = 48  # longer than any right answer
BASE = demo_model_path().name
ADAPTERS = tuple(sorted(TASKS))  # of one task each; ``tools`` has a form of its own
ALL_ADAPTERS = (*ADAPTERS, tool_calls.NAME)


@dataclass(frozen=True)
class Question:
    """One chat message to one model, and what the adapter of its task should say."""

    model: str
    text: str
    answer: str
    options: dict[str, Any] = field(default_factory=dict)


def questions(model: str, task: str, count: int, seed: int = 0) -> list[Question]:
    """``count`` unseen examples of ``task``, asked of ``model``."""
    return [Question(model, text, answer) for text, answer in unseen_examples(task, count, seed)]


def ask_all(url: str, asked: Sequence[Question], *, stream: bool = False) -> list[str]:
    """Ask all of them at once over the OpenAI client and return the texts, in order."""

    async def run() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=ANSWER_TIMEOUT_S, max_retries=0
        ) as client:
            ask = _ask_streaming if stream else _ask
            return list(await asyncio.gather(*(ask(client, question) for question in asked)))

    return asyncio.run(run())


def share_right(asked: Sequence[Question], texts: Sequence[str]) -> float:
    """Which part of the questions was answered right to the last character."""
    right = [text == question.answer for question, text in zip(asked, texts, strict=True)]
    return sum(right) / len(right)


async def _ask(client: AsyncOpenAI, question: Question) -> str:
    answer = await client.chat.completions.create(
        model=question.model,
        messages=[{"role": "user", "content": question.text}],
        max_tokens=MAX_TOKENS,
        **question.options,
    )
    return answer.choices[0].message.content or ""


async def _ask_streaming(client: AsyncOpenAI, question: Question) -> str:
    pieces = []
    stream = await client.chat.completions.create(
        model=question.model,
        messages=[{"role": "user", "content": question.text}],
        max_tokens=MAX_TOKENS,
        stream=True,
        **question.options,
    )
    async for chunk in stream:
        assert isinstance(chunk, ChatCompletionChunk)
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(pieces)
