"""What users of the anthropic package do; runs in the package's own environment."""

import sys
from typing import Any

import anthropic

CITY, ANSWER, THOUGHT = "Paris", "It is sunny.", "I look outside."
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    }
]


def check_text(client: anthropic.Anthropic) -> None:
    """Whole answers, streams, and reasoning."""
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 100, "messages": ASKED}
    whole = client.messages.create(system="Be brief.", **asked)
    assert [block.text for block in whole.content] == [ANSWER], whole
    assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 3), whole
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens == 3
    thought = client.messages.create(output_config={"effort": "low"}, **asked)
    assert [block.type for block in thought.content] == ["thinking", "text"], thought
    assert thought.content[0].thinking.strip() == THOUGHT
    cut = client.messages.create(**(asked | {"max_tokens": 1}))
    assert cut.stop_reason == "max_tokens", cut


def check_tools(client: anthropic.Anthropic) -> None:
    """A call, its result, a stream of arguments, and calls that must come."""
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 100, "tools": TOOLS}
    called = client.messages.create(messages=ASKED, **asked)
    (call,) = called.content
    assert (called.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": CITY})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [
        *ASKED,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    told = client.messages.create(messages=history, **asked)
    assert told.content[0].text == ANSWER, told
    with client.messages.stream(messages=ASKED, **asked) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_message().content
    assert "input_json" in kinds and streamed.input == {"city": CITY}, (kinds, streamed)
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        forced = client.messages.create(messages=ASKED, tool_choice=choice, **asked)
        assert [block.type for block in forced.content] == ["tool_use"], forced
    quiet = client.messages.create(messages=ASKED, tool_choice={"type": "none"}, **asked)
    assert [block.type for block in quiet.content] == ["text"], quiet


def check_errors(client: anthropic.Anthropic) -> None:
    """The classes that applications catch."""
    for kind, fields in (
        (anthropic.NotFoundError, {"model": "nobody"}),
        (anthropic.BadRequestError, {"max_tokens": -1}),
        (anthropic.BadRequestError, {"messages": []}),
    ):
        asked: dict[str, Any] = {"model": "scripted", "max_tokens": 10, "messages": ASKED}
        try:
            client.messages.create(**(asked | fields))
        except kind as error:
            assert error.body, error
        else:
            raise AssertionError(f"{fields} was answered")


def main() -> None:
    """Ask the server at the address given."""
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
    check_text(client)
    check_tools(client)
    check_errors(client)


if __name__ == "__main__":
    main()
