"""Samples of the demo's adapter ``tools``: unseen ones stay unseen, texts are the template's."""

import json
from random import Random
from typing import Any

import jinja2
import pytest
from demo.tasks import is_unseen
from demo.tool_calls import CHAT_TEMPLATE, call_text, prompt_text, seen_case, unseen_cases


def render(messages: list[dict[str, Any]], **more: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, **more)


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def test_training_and_evaluation_share_no_prompt() -> None:
    rng = Random(0)
    seen = {seen_case(rng).prompt for _ in range(2000)}
    cases = unseen_cases(200, seed=0)
    assert len({case.prompt for case in cases}) == 200
    assert all(is_unseen(case.prompt) for case in cases)
    assert not any(is_unseen(prompt) for prompt in seen)


def test_a_prompt_is_what_the_template_writes() -> None:
    for case in unseen_cases(100, seed=1):
        lines = [] if case.system is None else case.system.split("\n")
        tools = [
            tool(name, *filter(None, rest.rstrip(")").split(", ")))
            for name, found, rest in (line.partition("(") for line in lines)
            if found
        ]
        system = [{"role": "system", "content": line} for line in lines if "(" not in line]
        messages = [*system, {"role": "user", "content": case.prompt}]
        text = render(messages, tools=tools, add_generation_prompt=True)
        assert text == prompt_text(case)


def test_a_call_and_its_result_are_written_as_trained() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    written = call_text("add", {"a": 1, "b": 2})
    assert json.loads(written[len("<tool_call>") : -len("</tool_call>")]) == {
        "name": "add",
        "arguments": {"a": 1, "b": 2},
    }
    text = render(messages, add_generation_prompt=True)
    assert text == (
        f"<|user|>1+2<|assistant|>{written}<|end|><|user|><tool_response>3</tool_response><|assistant|>"
    )


def test_an_unknown_role_is_refused() -> None:
    environment = jinja2.Environment(autoescape=False)

    def raise_exception(text: str) -> None:
        raise ValueError(text)

    template = environment.from_string(CHAT_TEMPLATE)
    with pytest.raises(ValueError, match="unknown role: judge"):
        template.render(messages=[{"role": "judge", "content": "x"}], raise_exception=raise_exception)
