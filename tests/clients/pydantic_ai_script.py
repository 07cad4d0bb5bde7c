"""What users of pydantic-ai do; runs in the package's own environment."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ANSWER = "It is sunny."
QUESTION = "How is the weather in Paris?"


class Report(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int
    is_sunny: bool


def check_text(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """Text, with instructions and with a tool that the model calls."""
    agent = Agent(model, instructions="Be brief.")
    assert agent.run_sync(QUESTION).output == ANSWER
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    told = agent.run_sync(QUESTION)
    assert (told.output, asked) == (ANSWER, ["Paris"]), told
    assert told.usage.requests == 2


def check_structure(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """Each way to an output of a type."""
    for form in (Report, ToolOutput(Report), NativeOutput(Report), PromptedOutput(Report)):
        agent = Agent(model, output_type=form, retries=0)
        answer = agent.run_sync(QUESTION).output
        assert isinstance(answer, Report), (form, answer)


async def check_streams(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """Text, and an output of a type."""
    async with Agent(model).run_stream(QUESTION) as stream:
        assert await stream.get_output() == ANSWER
    async with Agent(model, output_type=Report).run_stream(QUESTION) as stream:
        assert isinstance(await stream.get_output(), Report)


def main() -> None:
    """Ask the server at the address given, over both APIs."""
    provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        check_text(kind("scripted", provider=provider))
        check_structure(kind("scripted", provider=provider))
        asyncio.run(check_streams(kind("scripted", provider=provider)))


if __name__ == "__main__":
    main()
