"""Answers with structure in a whole engine: beside free rows, and with little memory."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from corun import Engine, LoRARequest, RequestOutput, SamplingParams, StructuredOutput
from corun.runtime.demo import chat_prompt, demo_adapters_path

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
RECORD = StructuredOutput("json_schema", json.dumps(SCHEMA))
DATE = StructuredOutput("regex", r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]")
CHOICE = StructuredOutput("choice", '["yes", "no", "not now"]')
# Long enough for all of these, but for an answer of whitespace.
MAX_TOKENS = 120
ADAPTERS = (None, "upper", "reverse")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", max_num_batched_tokens=16) as engine:  # prompts come in chunks
        yield engine


def params(seed: int, structured: StructuredOutput | None, **fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, structured_output=structured, **fields
    )


def lora(name: str | None) -> LoRARequest | None:
    if name is None:
        return None
    return LoRARequest(name, 1 + ADAPTERS.index(name), str(demo_adapters_path() / name))


def check(text: str, structured: StructuredOutput) -> None:
    """That an answer which has ended is valid."""
    if structured is DATE:
        assert re.fullmatch(DATE.text, text), text
    elif structured is CHOICE:
        assert text in json.loads(CHOICE.text)
    else:
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"], text
        assert re.fullmatch("[a-z]{2,8}", value["name"]), text
        assert isinstance(value["age"], int) and 0 <= value["age"] <= 150, text
        assert len(value["tags"]) <= 2 and set(value["tags"]) <= {"new", "old"}, text


def check_all(outputs: list[RequestOutput], asked: list[StructuredOutput | None]) -> None:
    """That answers are valid, and that enough of them have ended for this to say something."""
    num_ended = 0
    for output, structured in zip(outputs, asked, strict=True):
        for choice in output.outputs:
            if structured is not None and choice.finish_reason == "stop":
                check(choice.text, structured)
                num_ended += 1
    assert num_ended > len(asked) // 3


def ask(engine: Engine, asked: list[StructuredOutput | None], **options: Any) -> list[RequestOutput]:
    prompts = [chat_prompt(f"hello {number % 3}, and once more") for number in range(len(asked))]
    loras = [lora(ADAPTERS[number % len(ADAPTERS)]) for number in range(len(asked))]
    sampling = [params(number, structured) for number, structured in enumerate(asked)]
    return engine.generate(prompts, sampling, loras, **options)


MIXED: list[StructuredOutput | None] = [RECORD, None, DATE, None, CHOICE, None, RECORD, DATE] * 3


def test_rows_of_all_kinds_beside_each_other(engine: Engine) -> None:
    outputs = ask(engine, MIXED)
    check_all(outputs, MIXED)
    alone = ask(engine, [None] * len(MIXED))  # the same prompts, adapters and seeds
    for number, structured in enumerate(MIXED):
        if structured is None:
            assert outputs[number].outputs[0].text == alone[number].outputs[0].text
    again = ask(engine, MIXED)  # prefixes of the prompts are in memory now
    check_all(again, MIXED)
    assert any(one.outputs[0].num_cached_tokens for one in again)


def test_each_choice_follows_the_grammar_alone(engine: Engine) -> None:
    (output,) = engine.generate(chat_prompt("hello"), params(3, DATE, n=6))
    texts = [choice.text for choice in output.outputs]
    assert len(set(texts)) > 1
    for choice in output.outputs:
        assert choice.finish_reason == "stop"
        check(choice.text, DATE)


def test_preempted_rows_keep_to_their_grammars() -> None:
    with Engine(
        device="cpu",
        memory_gib=0.0011,
        max_model_len=192,
        growth_headroom=0.0,
        max_num_batched_tokens=32,
        scheduling_policy="fcfs",
    ) as engine:
        outputs = ask(engine, MIXED, predicted_output_tokens=1)
        assert engine.get_stats().num_preemptions > 2
    check_all(outputs, MIXED)


def test_text_without_a_choice_takes_fewer_steps(engine: Engine) -> None:
    steps_per_token = {}
    for is_forced in (True, False):
        num_steps = engine.get_stats().num_steps
        sampling = params(3, RECORD, structured_forced_tokens=is_forced)
        ((choice,),) = [one.outputs for one in engine.generate(chat_prompt("hello"), sampling)]
        assert choice.finish_reason == "stop"
        check(choice.text, RECORD)
        num_steps = engine.get_stats().num_steps - num_steps
        steps_per_token[is_forced] = num_steps / len(choice.token_ids)
    assert steps_per_token[True] < 0.75 * steps_per_token[False]


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_limits_and_stop_strings_hold_within_forced_tokens(engine: Engine, max_tokens: int) -> None:
    sampling = params(3, RECORD)
    (whole,) = engine.generate(chat_prompt("hello"), sampling)
    cut = dataclasses.replace(sampling, max_tokens=max_tokens)
    (output,) = engine.generate(chat_prompt("hello"), cut)
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids[:max_tokens]
    assert output.outputs[0].finish_reason == "length"
    stop = '{"name": "'[: max_tokens + 1]
    (output,) = engine.generate(chat_prompt("hello"), dataclasses.replace(sampling, stop=(stop,)))
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", stop)
    num_tokens = len(choice.token_ids)
    assert choice.token_ids == whole.outputs[0].token_ids[:num_tokens]
    assert 0 < num_tokens <= len(stop)
