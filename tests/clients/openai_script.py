"""What users of the openai package do; runs in the package's own environment."""

import asyncio
import sys

import openai
from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "planet"}]


def check_chat(client: openai.OpenAI) -> None:
    """One answer, several, and a stream."""
    whole = client.chat.completions.create(model="upper", messages=MESSAGES, temperature=0)
    assert whole.choices[0].message.content == "PLANET", whole
    assert whole.usage is not None and whole.usage.completion_tokens > 1
    several = client.chat.completions.create(
        model="upper",
        messages=MESSAGES,
        n=2,
        logprobs=True,
        top_logprobs=2,
        seed=1,
        max_completion_tokens=3,
        stop=["X"],
        user="me",
        metadata={"a": "b"},
        store=False,
    )
    assert len(several.choices) == 2
    logprobs = several.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert all(len(one.top_logprobs) == 2 for one in logprobs.content)
    stream = client.chat.completions.create(
        model="upper", messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "PLANET"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens > 0


def check_history(client: openai.OpenAI) -> None:
    """The answer goes back as it came, with all that the client adds to it."""
    first = client.chat.completions.create(model="upper", messages=MESSAGES, temperature=0)
    message = first.choices[0].message.model_dump()
    again = client.chat.completions.create(
        model="upper",
        messages=[*MESSAGES, message, *MESSAGES],  # type: ignore[list-item]
        temperature=0,
    )
    assert again.choices[0].finish_reason == "stop"


def check_completions(client: openai.OpenAI) -> None:
    """Prompts of each kind."""
    for prompt in ("hello", ["hello", "bye"], [1, 2, 3], [[1, 2], [3]]):
        answer = client.completions.create(model="upper", prompt=prompt, max_tokens=3, logprobs=1)
        num_prompts = 1 if prompt in ("hello", [1, 2, 3]) else 2
        assert len(answer.choices) == num_prompts
    echoed = client.completions.create(model="upper", prompt="hello", max_tokens=1, echo=True)
    assert echoed.choices[0].text.startswith("hello")
    pieces = client.completions.create(model="upper", prompt="hello", max_tokens=3, stream=True)
    assert sum(len(piece.choices) for piece in pieces) >= 1


def check_errors(client: openai.OpenAI) -> None:
    """The classes that applications catch."""
    for kind, fields in (
        (openai.NotFoundError, {"model": "nobody"}),
        (openai.BadRequestError, {"model": "upper", "temperature": -1.0}),
        (openai.BadRequestError, {"model": "upper", "n": 1000}),
    ):
        try:
            client.completions.create(prompt="hello", **fields)
        except kind as error:
            assert error.body, error
        else:
            raise AssertionError(f"{fields} was answered")
    try:
        client.completions.create(model="upper", prompt="x" * 2000, max_tokens=1)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error


async def check_async(url: str) -> None:
    """Several at once, and one that is left in the middle."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        asked = [
            client.chat.completions.create(model="upper", messages=MESSAGES, temperature=0) for _ in range(8)
        ]
        answers = await asyncio.gather(*asked)
        assert {one.choices[0].message.content for one in answers} == {"PLANET"}
        stream = await client.completions.create(model="upper", prompt="hello", max_tokens=200, stream=True)
        async for _ in stream:
            break
        await stream.close()


def main() -> None:
    """Ask the server at the address given."""
    url = f"{sys.argv[1]}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    names = [model.id for model in client.models.list()]
    assert "upper" in names, names
    assert client.models.retrieve("upper").id == "upper"
    check_chat(client)
    check_history(client)
    check_completions(client)
    check_errors(client)
    asyncio.run(check_async(url))


if __name__ == "__main__":
    main()
