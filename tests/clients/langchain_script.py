"""What users of langchain-openai do; runs in the package's own environment."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

CITY, ANSWER = "Paris", "It is sunny."
QUESTION = "How is the weather in Paris? Answer as JSON."


class Report(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int
    is_sunny: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def check_text(model: ChatOpenAI) -> None:
    """Whole answers, streams and batches."""
    assert model.invoke(QUESTION).content == ANSWER
    pieces = list(model.stream(QUESTION))
    assert "".join(piece.text for piece in pieces) == ANSWER, pieces
    assert [one.content for one in model.batch([QUESTION] * 3)] == [ANSWER] * 3


def check_structure(model: ChatOpenAI, methods: tuple[str, ...]) -> None:
    """Each method of ``with_structured_output``."""
    for method in methods:
        form = Report.model_json_schema() if method == "json_mode" else Report
        answer = model.with_structured_output(form, method=method).invoke(QUESTION)
        assert isinstance(answer, dict if method == "json_mode" else Report), (method, answer)


def check_tools(model: ChatOpenAI) -> None:
    """A call, its result, and a call that must come."""
    asked = HumanMessage(QUESTION)
    bound = model.bind_tools([get_weather])
    called = bound.invoke([asked])
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": CITY}), called
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    told = bound.invoke([asked, called, result])
    assert told.text == ANSWER, told
    for choice in ("any", "get_weather"):
        forced = model.bind_tools([get_weather], tool_choice=choice).invoke([asked])
        assert forced.tool_calls[0]["name"] == "get_weather", forced
    whole = None
    for chunk in bound.stream([asked]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"] == {"city": CITY}, whole


def main() -> None:
    """Ask the server at the address given, over both APIs."""
    url = f"{sys.argv[1]}/v1"
    chat = ChatOpenAI(model="scripted", base_url=url, api_key="none", max_retries=0)
    check_text(chat)
    check_structure(chat, ("json_schema", "function_calling", "json_mode"))
    check_tools(chat)
    responses = ChatOpenAI(
        model="scripted", base_url=url, api_key="none", max_retries=0, use_responses_api=True
    )
    assert responses.invoke(QUESTION).text == ANSWER
    check_structure(responses, ("json_schema", "function_calling"))
    check_tools(responses)


if __name__ == "__main__":
    main()
