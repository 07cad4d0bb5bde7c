"""Response templates are checked when they are read, and the first one counts."""

import json
import logging
from typing import Any

import pytest
from corun.runtime.errors import NotServedError, RequestError
from corun.runtime.frontend.outputs import ChoiceHistory, CompletionOutput
from corun.runtime.sampling import SamplingParams
from corun.runtime.tools.call_format import CallFormat, arguments_schema
from corun.runtime.tools.families import family_fields, family_format, format_of
from corun.runtime.tools.offer import CallMode, Tools
from corun.runtime.tools.parts import joined, parsed
from corun.runtime.tools.reader import AnswerReader, Templates
from corun.runtime.tools.response_template import MAX_TEMPLATE_BYTES, read_template, template_of
from support.answer_samples import ADD, SAMPLES

QWEN = SAMPLES["qwen"]
CALLS = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "transform": {"function": {"name": "{content.tool}", "arguments": "{content.with}"}},
}
OWN: dict[str, Any] = {"start_anchor": "<a>", "fields": {"content": {}, "tool_calls": CALLS}}


def wrong(**field: Any) -> dict[str, Any]:
    return {"start_anchor": "x", "fields": {"f": {"open": "y"} | field}}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([], "it is not a JSON object"),
        ({"start_anchor": "x"}, "it has no fields"),
        ({"start_anchor": "x", "fields": {}}, "it has no fields"),
        (OWN | {"version": 2}, "its version is 2"),
        (OWN | {"extra": 1}, "unknown keys: extra"),
        ({"fields": OWN["fields"]}, "it has no start_anchor"),
        ({"start_anchor": "x", "fields": {"a": {}, "b": {}}}, "the fields a, b have no open"),
        ({"start_anchor": "x", "fields": {"a": 1}}, "the field 'a' is not a JSON object"),
        (wrong(open_pattern="y"), "has both open and open_pattern"),
        (wrong(close=""), "a text that is empty"),
        (wrong(close=[]), "is not a text or a list of texts"),
        (wrong(close_pattern="("), "is not a pattern"),
        (wrong(close_pattern=1), "is not a text"),
        (wrong(content="yaml"), "has the content 'yaml'"),
        (wrong(content_args=1), "content_args of the field 'f' is not an object"),
        (wrong(transform="{a} b"), "mixes a placeholder with text"),
        (wrong(close_pattern="(?P<name>y)"), r"has the groups \['name'\], but no transform"),
        (wrong(opens="y"), "unknown keys: opens"),
    ],
)
def test_mistakes_are_named(template: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        template_of(template)
    with pytest.raises(ValueError, match=message):
        read_template(json.dumps(template))


def test_texts_that_are_too_long_or_no_json_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        read_template(" " * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ValueError, match="Expecting"):
        read_template("{")
    with pytest.raises(ValueError, match="too deep"):
        read_template("[" * 100_000)


def test_the_form_of_calls_follows_from_a_template_with_json() -> None:
    assert format_of(template_of(OWN), None).calls == CallFormat(
        '<call>{"tool": "', '", "with": ', "}</call>", separator=""
    )
    fields = family_fields(SAMPLES["mistral"].chat_template)["fields"]
    each = fields["tool_calls"] | {"open": "[TOOL_CALLS]"}
    del each["open_pattern"]
    found = format_of(template_of(OWN | {"fields": {"tool_calls": each}}), None).calls
    family = family_format(SAMPLES["mistral"].chat_template)
    assert family is not None and found == family.calls
    for name in ("gemma", "qwen coder"):
        other = family_format(SAMPLES[name].chat_template)
        assert other is not None and other.calls is None


def tools(mode: CallMode = CallMode.ALLOWED) -> Tools:
    return Tools(
        definitions=[{"type": "function", "function": {"name": "add"}}],
        mode=mode,
        callable_names=["add"],
        parameters={"add": arguments_schema(ADD)},
        strict_names=frozenset(),
        is_parallel=True,
    )


def reader_for(offered: Tools | None, templates: Templates) -> AnswerReader:
    reader = AnswerReader(offered, splits_reasoning=True, shows_reasoning=True, is_live=False)
    reader.begin("<a>", SamplingParams(), templates, {}, lambda text: False, str)
    return reader


def called(templates: Templates, text: str) -> list[tuple[str, str]]:
    calls = parsed(text, reader_for(tools(), templates).parser()).calls
    return [(one.head.name, one.arguments) for one in calls]


def test_the_first_template_counts() -> None:
    own = '<call>{"tool": "add", "with": {"x": 1}}</call>'
    described = json.dumps(OWN)
    assert called([(described, None), (None, QWEN.chat_template)], own) == [("add", '{"x": 1}')]
    assert called([(None, None), (described, QWEN.chat_template)], own) == [("add", '{"x": 1}')]
    assert called([(None, QWEN.chat_template), (described, None)], own) == []
    assert called([(None, QWEN.chat_template), (described, None)], QWEN.text) == list(QWEN.calls)
    assert called([(None, "no marks"), (described, None)], own) == [("add", '{"x": 1}')]


def test_a_template_that_cannot_be_read_refuses_tools_alone(caplog: pytest.LogCaptureFixture) -> None:
    broken: Templates = [('{"fields": {}, "version": 1}', None)]
    with caplog.at_level(logging.WARNING):
        assert reader_for(None, broken).is_plain
    assert "response template cannot be read: it has no fields" in caplog.text
    with pytest.raises(RequestError, match="response template cannot be read: it has no fields"):
        reader_for(tools(), broken)


def output_of(text: str, reason: str) -> CompletionOutput:
    """An answer that ended with token 7."""
    history = ChoiceHistory(logprobs=None)
    history.token_ids.append(7)
    history.pieces.append(text)
    return CompletionOutput(
        index=0,
        new_text="",
        new_token_ids=[],
        new_logprobs=None,
        cumulative_logprob=None,
        finish_reason=reason,
        stop_reason=None,
        history=history,
        num_pieces=1,
        num_tokens=1,
    )


def test_without_a_known_form_only_forced_calls_are_served() -> None:
    with pytest.raises(NotServedError, match="--response-template FILE"):
        reader_for(tools(), [(None, "no marks")])
    reader = reader_for(tools(CallMode.REQUIRED), [(None, "no marks")])
    text = '[{"name": "add", "arguments": {"x": 1}}]'
    (call,) = parsed(text, reader.parser()).calls
    assert (call.head.name, call.arguments) == ("add", '{"x": 1}')


def test_a_template_may_need_the_token_that_ends_an_answer() -> None:
    calls = {
        "open_pattern": r'\{"name": "(?P<name>\w+)", "parameters": ',
        "close_pattern": r"\}<\|eot_id\|>\s*",
        "content": "json",
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }
    own = {"start_anchor": "<a>", "fields": {"content": {}, "tool_calls": calls}}
    llama = SAMPLES["llama"]
    templates: Templates = [(json.dumps(own), llama.chat_template)]
    described = format_of(template_of(own), llama.chat_template)
    family = family_format(llama.chat_template)
    assert family is not None and described.calls == family.calls
    for ended, expected in ((True, list(llama.calls)), (False, [])):
        reader = AnswerReader(tools(), splits_reasoning=True, shows_reasoning=True, is_live=False)
        reader.begin("<a>", SamplingParams(), templates, {}, lambda text: True, {7: "<|eot_id|>"}.__getitem__)
        parser = reader.parser()
        output = output_of(llama.text, "stop" if ended else "length")
        answer = joined([*parser.feed(llama.text), *reader.rest(parser, output)])
        assert [(one.head.name, one.arguments) for one in answer.calls] == expected
        assert answer.content == ("" if ended else llama.text)


def test_an_end_mark_that_is_shown_is_read_once() -> None:
    """A grammar can end an answer with a mark, before any end token."""
    reader = AnswerReader(tools(), splits_reasoning=True, shows_reasoning=True, is_live=False)
    templates: Templates = [(None, QWEN.chat_template)]
    names = {7: "</tool_call>"}
    reader.begin("<a>", SamplingParams(), templates, {}, lambda text: False, names.__getitem__)
    answer = joined(reader.whole(output_of(QWEN.text, "stop")))
    assert answer.content == QWEN.content
    assert [(one.head.name, one.arguments) for one in answer.calls] == list(QWEN.calls)
