"""A tool call and an answer of a schema, from a running server (``make serve``)."""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam
from pydantic import BaseModel


class Person(BaseModel):
    """What the second answer has."""

    name: str
    age: int


WEATHER: ChatCompletionToolUnionParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

url = os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1")
key = os.environ.get("OPENAI_API_KEY", "none")
with OpenAI(base_url=url, api_key=key) as client:
    question: ChatCompletionMessageParam = {"role": "user", "content": "weather in Rome"}
    answer = client.chat.completions.create(model="tools", messages=[question], tools=[WEATHER])
    calls = answer.choices[0].message.tool_calls
    assert calls and calls[0].type == "function"
    name, arguments = calls[0].function.name, calls[0].function.arguments
    print(name, json.loads(arguments))  # get_weather {'city': 'Rome'}

    asked: ChatCompletionMessageParam = {
        "role": "assistant",
        "tool_calls": [
            {"id": calls[0].id, "type": "function", "function": {"name": name, "arguments": arguments}}
        ],
    }
    result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}
    answer = client.chat.completions.create(
        model="tools", messages=[question, asked, result], tools=[WEATHER]
    )
    print(answer.choices[0].message.content)  # The answer is sunny.

    parsed = client.chat.completions.parse(
        model="tools", messages=[{"role": "user", "content": "Anna is 31 years old"}], response_format=Person
    )
    print(parsed.choices[0].message.parsed)  # name='Anna' age=31
