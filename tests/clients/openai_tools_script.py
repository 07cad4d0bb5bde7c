"""Structure, tools, reasoning and responses with the openai package, over the scripted model.

Runs in the package's own environment, and in ``tests/e2e`` in the one of corun.
"""

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

CITY, ANSWER, THOUGHT = "Paris", "It is sunny.", "I look outside."
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
FLAT_TOOLS: list[Any] = [{"type": "function", "strict": False, **WEATHER}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Report(BaseModel):
    """A form that each answer must have."""

    city: Literal["Paris", "Rome"]
    degrees: int
    is_sunny: bool
    winds: list[Literal["north", "south"]]


def check_parse(client: openai.OpenAI, model: str) -> None:
    """``.parse()``, its stream, and JSON without a schema."""
    whole = client.chat.completions.parse(model=model, messages=ASKED, response_format=Report)
    assert isinstance(whole.choices[0].message.parsed, Report), whole
    with client.chat.completions.stream(model=model, messages=ASKED, response_format=Report) as stream:
        streamed = stream.get_final_completion()
    assert isinstance(streamed.choices[0].message.parsed, Report), streamed
    loose = client.chat.completions.create(
        model=model, messages=ASKED, response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(loose.choices[0].message.content or ""), dict), loose


def check_tools(client: openai.OpenAI, model: str) -> None:
    """A call that the model decides on, its result, and calls that must come."""
    asked = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS)
    (choice,) = asked.choices
    assert choice.finish_reason == "tool_calls", asked
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": CITY}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*ASKED, choice.message.model_dump(exclude_none=True), result]
    told = client.chat.completions.create(model=model, messages=history, tools=TOOLS)
    assert told.choices[0].message.content == ANSWER and not told.choices[0].message.tool_calls
    for tool_choice in ("required", NAMED):
        forced = client.chat.completions.create(
            model=model, messages=ASKED, tools=TOOLS, tool_choice=tool_choice, parallel_tool_calls=False
        )
        (call,) = forced.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments).keys() == {"city"}, forced
        assert not forced.choices[0].message.content, forced
    quiet = client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, tool_choice="none")
    assert quiet.choices[0].message.content == ANSWER, quiet
    strict: list[Any] = [openai.pydantic_function_tool(Report)]
    read = client.chat.completions.parse(model=model, messages=ASKED, tools=strict, tool_choice="required")
    assert isinstance((read.choices[0].message.tool_calls or [])[0].function.parsed_arguments, Report)


def check_streams_of_tools(client: openai.OpenAI, model: str) -> None:
    """Arguments in pieces, by hand and through the client."""
    pieces, name = [], ""
    for chunk in client.chat.completions.create(model=model, messages=ASKED, tools=TOOLS, stream=True):
        for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            assert call.index == 0 and call.function is not None
            name += call.function.name or ""
            pieces.append(call.function.arguments or "")
    assert name == "get_weather" and json.loads("".join(pieces)) == {"city": CITY}, pieces
    with client.chat.completions.stream(model=model, messages=ASKED, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls", final


def check_reasoning(client: openai.OpenAI, model: str) -> None:
    """Reasoning beside the content, whole and streamed."""
    whole = client.chat.completions.create(model=model, messages=ASKED, reasoning_effort="low")
    message: Any = whole.choices[0].message
    assert (message.reasoning_content.strip(), message.content.strip()) == (THOUGHT, ANSWER), whole
    thoughts = texts = ""
    for chunk in client.chat.completions.create(
        model=model, messages=ASKED, reasoning_effort="low", stream=True
    ):
        delta: Any = chunk.choices[0].delta
        thoughts += getattr(delta, "reasoning_content", None) or ""
        texts += delta.content or ""
    assert (thoughts.strip(), texts.strip()) == (THOUGHT, ANSWER)


def check_responses(client: openai.OpenAI, model: str) -> None:
    """Text, structure and reasoning of responses."""
    plain = client.responses.create(model=model, input="hi", instructions="Be brief.", store=False)
    assert plain.output_text == ANSWER and plain.usage is not None, plain
    with client.responses.stream(model=model, input="hi", text_format=Report) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Report)
    parsed = client.responses.parse(model=model, input="hi", text_format=Report)
    assert isinstance(parsed.output_parsed, Report), parsed
    loose = client.responses.create(model=model, input="hi", text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(loose.output_text), dict), loose
    thought = client.responses.create(model=model, input="hi", reasoning={"effort": "low"})
    assert [item.type for item in thought.output] == ["reasoning", "message"], thought
    assert thought.output_text.strip() == ANSWER
    kinds = [
        event.type
        for event in client.responses.create(
            model=model, input="hi", reasoning={"effort": "low"}, stream=True
        )
    ]
    assert "response.reasoning_text.delta" in kinds and kinds[-1] == "response.completed", kinds


def check_tools_of_responses(client: openai.OpenAI, model: str) -> None:
    """A call, its result, a call that must come, and a stream."""
    asked = client.responses.create(model=model, input=ASKED, tools=FLAT_TOOLS)
    (call,) = asked.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": CITY}, asked
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history: list[Any] = [*ASKED, *asked.output, result]
    told = client.responses.create(model=model, input=history, tools=FLAT_TOOLS)
    assert told.output_text == ANSWER, told
    choices: tuple[Any, ...] = ("required", {"type": "function", "name": "get_weather"})
    for choice in choices:
        forced = client.responses.create(
            model=model, input=ASKED, tools=FLAT_TOOLS, tool_choice=choice, parallel_tool_calls=False
        )
        assert [item.type for item in forced.output] == ["function_call"], forced
    with client.responses.stream(model=model, input=ASKED, tools=FLAT_TOOLS) as stream:
        kinds = [event.type for event in stream]
        (final,) = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds, kinds
    assert final.type == "function_call" and json.loads(final.arguments) == {"city": CITY}


def check_refused(client: openai.OpenAI, model: str) -> None:
    """What is not served is named."""
    refused: tuple[Any, ...] = ({"previous_response_id": "resp_1"}, {"store": True}, {"background": True})
    for fields in refused:
        try:
            client.responses.create(model=model, input="hi", **fields)
        except openai.BadRequestError as error:
            assert error.param in fields, error
        else:
            raise AssertionError(f"{fields} was answered")


CHECKS = (
    check_parse,
    check_tools,
    check_streams_of_tools,
    check_reasoning,
    check_responses,
    check_tools_of_responses,
    check_refused,
)


def main() -> None:
    """Ask the server at the address given."""
    client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    for check in CHECKS:
        check(client, "scripted")


if __name__ == "__main__":
    main()
