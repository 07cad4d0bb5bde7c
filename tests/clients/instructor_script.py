"""The modes of instructor that a server serves; runs in the package's own environment."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.MD_JSON,
    instructor.Mode.RESPONSES_TOOLS,
)


class Report(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    degrees: int
    is_sunny: bool


def main() -> None:
    """Ask the server at the address given, once in each mode and as a stream."""
    plain = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "How is the weather in Paris?"}]
    for mode in MODES:
        client = instructor.from_openai(plain, mode=mode)
        answer = client.chat.completions.create(
            model="scripted", messages=messages, response_model=Report, max_retries=0
        )
        assert isinstance(answer, Report), (mode, answer)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    partial = list(
        client.chat.completions.create_partial(
            model="scripted", messages=messages, response_model=Report, max_retries=0
        )
    )
    assert partial[-1].city in ("Paris", "Rome"), partial


if __name__ == "__main__":
    main()
