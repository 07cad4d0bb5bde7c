"""What users of llama-index's OpenAILike do; runs in the package's own environment."""

import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

CITY, ANSWER = "Paris", "It is sunny."
QUESTION = "How is the weather in Paris?"


class Report(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int
    is_sunny: bool


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def main() -> None:
    """Ask the server at the address given."""
    model = OpenAILike(
        model="scripted",
        api_base=f"{sys.argv[1]}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=16384,
        max_retries=0,
    )
    asked = [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(asked).message.content == ANSWER
    assert "".join(one.delta or "" for one in model.stream_chat(asked)) == ANSWER
    assert model.complete(QUESTION).text == ANSWER
    structured = model.structured_predict(Report, PromptTemplate(QUESTION))
    assert isinstance(structured, Report), structured
    through = model.as_structured_llm(Report).complete(QUESTION)
    assert isinstance(through.raw, Report), through
    weather = FunctionTool.from_defaults(get_weather)
    called = model.chat_with_tools([weather], QUESTION)
    (call,) = model.get_tool_calls_from_response(called)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": CITY}), called
    done = model.predict_and_call([weather], QUESTION)
    assert CITY in done.response, done
    forced = model.chat_with_tools([weather], QUESTION, tool_required=True)
    assert model.get_tool_calls_from_response(forced)[0].tool_name == "get_weather", forced


if __name__ == "__main__":
    main()
