"""What users of LiteLLM's package do; runs in the package's own environment."""

import json
import sys
from typing import Any, Literal

import litellm
from pydantic import BaseModel

CITY, ANSWER = "Paris", "It is sunny."
ASKED = [{"role": "user", "content": "How is the weather in Paris?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


class Report(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int
    is_sunny: bool


def check(provider: str, url: str) -> None:
    """Text, structure and tools, as users ask a provider."""

    def ask(**fields: Any) -> Any:
        return litellm.completion(
            model=f"{provider}/scripted",
            api_base=url,
            api_key="none",
            num_retries=0,
            **{"messages": ASKED, **fields},
        )

    assert ask().choices[0].message.content == ANSWER
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    assert "".join(pieces) == ANSWER, pieces
    Report.model_validate_json(ask(response_format=Report).choices[0].message.content)
    json.loads(ask(response_format={"type": "json_object"}).choices[0].message.content)
    message = ask(tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": CITY}, message
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    told = ask(messages=[*ASKED, message, result], tools=TOOLS)
    assert told.choices[0].message.content == ANSWER, told
    forced = ask(tools=TOOLS, tool_choice="required").choices[0].message
    assert forced.tool_calls[0].function.name == "get_weather", forced


def main() -> None:
    """Ask the server at the address given."""
    url = f"{sys.argv[1]}/v1"
    for provider in ("openai", "hosted_vllm"):
        check(provider, url)
    response = litellm.responses(
        model="openai/scripted", input="hi", api_base=url, api_key="none", num_retries=0
    )
    assert response.output[0].content[0].text == ANSWER, response


if __name__ == "__main__":
    main()
