"""Grammars of calls accept what a family writes, with valid arguments, and nothing else."""

from collections.abc import Mapping
from typing import Any

import pytest
from corun.runtime.grammar.compile import compile_grammar, parser_limits
from corun.runtime.grammar.schema import json_rule
from corun.runtime.sampling import StructuredOutput
from corun.runtime.tools.call_format import PLAIN_CALLS, CallGrammar, arguments_schema
from corun.runtime.tools.families import AnswerFormat, family_format
from llguidance import LLMatcher, LLTokenizer
from support.answer_samples import ADD, NOW, SAMPLES

FUNCTIONS = {"add": ADD, "now": NOW}
BYTES = LLTokenizer("byte")
CONSTRAINED = ["qwen", "llama", "mistral", "mistral 11", "gpt-oss"]


def format_for(name: str) -> AnswerFormat:
    found = family_format(SAMPLES[name].chat_template)
    assert found is not None and found.calls is not None
    return found


def grammar_for(name: str, **changes: Any) -> CallGrammar:
    found = format_for(name)
    assert found.calls is not None
    values: dict[str, Any] = {
        "calls": found.calls,
        "functions": FUNCTIONS,
        "is_parallel": True,
        "reasoning": found.reasoning,
        "opens_content": found.opens_content,
        "mark_ids": {},
    }
    return CallGrammar(**(values | changes))


def accepts(grammar: str, text: str) -> bool:
    structured = StructuredOutput("grammar", grammar)
    matcher = LLMatcher(BYTES, compile_grammar(structured), limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def calls_of(name: str) -> str:
    """What the model writes, without text before the calls."""
    sample = SAMPLES[name]
    return sample.text.replace(f"{sample.content}\n", "").replace("Now:", "")


@pytest.mark.parametrize("name", CONSTRAINED)
def test_forced_calls_are_calls_alone(name: str) -> None:
    grammar = grammar_for(name).forced()
    text = calls_of(name)
    assert accepts(grammar, text)
    assert not accepts(grammar, "")
    assert not accepts(grammar, "Some text")
    assert not accepts(grammar, text.replace('"x": 1', '"x": true'))
    assert not accepts(grammar, text.replace('"x": 1, ', ""))
    assert not accepts(grammar, text.replace("add", "sub"))


@pytest.mark.parametrize("name", CONSTRAINED)
def test_optional_calls_or_text(name: str) -> None:
    grammar = grammar_for(name).optional()
    text = calls_of(name)
    assert accepts(grammar, format_for(name).opens_content + "Some text, 2 < 3")
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace('"x": 1', '"x": true'))


@pytest.mark.parametrize("name", ["qwen", "mistral", "mistral 11"])
def test_text_before_optional_calls_does_not_free_them(name: str) -> None:
    grammar = grammar_for(name, reasoning=None).optional()
    text = calls_of(name).rpartition("</think>\n\n")[2].rpartition("[/THINK]")[2]
    assert accepts(grammar, f"Some text. {text}")
    assert not accepts(grammar, f"Some text. {text}".replace('"x": 1', '"x": true'))


def test_one_call_at_most_unless_calls_are_parallel() -> None:
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    single = grammar_for("qwen", is_parallel=False).forced()
    assert accepts(single, one)
    assert not accepts(single, f"{one}\n{one}")
    assert accepts(grammar_for("qwen").forced(), f"{one}\n{one}\n{one}")


def test_reasoning_may_come_before_calls_and_ends() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    begun = grammar_for("qwen", is_reasoning=True).forced()
    assert accepts(begun, f"hm\n</think>\n\n{call}")
    assert not accepts(begun, call)
    assert not accepts(grammar_for("qwen", reasoning=None).forced(), f"<think>hm</think>{call}")


def test_calls_beside_other_structure() -> None:
    schema = {
        "type": "object",
        "properties": {"z": {"type": "null"}},
        "required": ["z"],
        "additionalProperties": False,
    }
    grammar = grammar_for("qwen").instead_of(json_rule(schema))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(grammar, '{"z": null}')
    assert accepts(grammar, f"<think>\nhm</think>\n\n{call}")
    assert not accepts(grammar, "Some text")
    without = grammar_for("qwen", functions={}).without_calls(json_rule(schema))
    assert accepts(without, '<think>hm</think>{"z": null}')
    assert not accepts(without, call)


def test_plain_calls_are_a_list() -> None:
    grammar = CallGrammar(calls=PLAIN_CALLS, functions=FUNCTIONS, is_parallel=True, mark_ids={}).forced()
    assert accepts(grammar, '[{"name": "add", "arguments": {"x": 1}}, {"name": "now", "arguments": {}}]')
    assert not accepts(grammar, "[]")


def test_marks_that_are_tokens_are_written_as_ids() -> None:
    ids: Mapping[str, int] = {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9}
    grammar = grammar_for("qwen", mark_ids=ids)
    assert "<[7]>" in grammar.forced() and "<[8]>" in grammar.forced()
    assert "thoughts: ANY <[9]>" in grammar.forced()
    assert "lead: ANY <[7]>" in grammar.optional()
    assert "tool_call>" not in grammar.optional()


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        (None, NOW),
        ({}, NOW),
        ({"properties": {"x": {}}}, {"type": "object", "properties": {"x": {}}}),
        (ADD, ADD),
    ],
)
def test_arguments_are_an_object(parameters: object, schema: object) -> None:
    assert arguments_schema(parameters) == schema
