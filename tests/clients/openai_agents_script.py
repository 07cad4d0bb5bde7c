"""What users of openai-agents do; runs in the package's own environment."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

ANSWER = "It is sunny."
QUESTION = "How is the weather in Paris?"
CALLS: list[str] = []


class Report(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int
    is_sunny: bool


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    CALLS.append(city)
    return "sunny"


async def check(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> None:
    """Text, a tool, a handoff, an output of a type, and a stream."""
    plain = Agent(name="plain", instructions="Be brief.", model=model)
    assert (await Runner.run(plain, QUESTION)).final_output == ANSWER
    CALLS.clear()
    reporter = Agent(name="reporter", model=model, tools=[get_weather])
    assert (await Runner.run(reporter, QUESTION)).final_output == ANSWER
    assert CALLS == ["Paris"]
    must = ModelSettings(tool_choice="required")
    triage = Agent(name="triage", model=model, handoffs=[plain], model_settings=must)
    handed = await Runner.run(triage, QUESTION)
    assert (handed.last_agent.name, handed.final_output) == ("plain", ANSWER), handed
    typed = Agent(name="typed", model=model, output_type=Report)
    assert isinstance((await Runner.run(typed, QUESTION)).final_output, Report)
    streamed = Runner.run_streamed(reporter, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output == ANSWER and "raw_response_event" in kinds


def main() -> None:
    """Ask the server at the address given, over both APIs."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)

    async def run() -> None:
        await check(OpenAIChatCompletionsModel("scripted", client))
        await check(OpenAIResponsesModel("scripted", client))

    asyncio.run(run())


if __name__ == "__main__":
    main()
