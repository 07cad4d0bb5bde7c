"""Answers are divided into parts: the same ones however the text arrives."""

import itertools
import json
from typing import Any

import pytest
from corun.runtime.errors import RequestError
from corun.runtime.tools.families import family_fields, family_format
from corun.runtime.tools.parser import ParserOptions, TemplateParser, new_call_id
from corun.runtime.tools.parts import AnswerPart, ParsedAnswer, PartKind, joined, parsed
from corun.runtime.tools.response_template import ResponseTemplate, template_of
from support.answer_samples import ADD, NOW, SAMPLES, Sample

PARAMETERS = {"add": ADD, "now": NOW}
HELD, LIVE = (ParserOptions(parameters=PARAMETERS), ParserOptions(parameters=PARAMETERS, is_live=True))
QWEN = SAMPLES["qwen"]


def template_for(sample: Sample) -> ResponseTemplate:
    found = family_format(sample.chat_template)
    assert found is not None
    return found.template


def parser_for(sample: Sample, options: ParserOptions = HELD) -> TemplateParser:
    ids = itertools.count()
    return TemplateParser(template_for(sample), options, sample.prompt, lambda: f"c{next(ids)}")


def meaning(answer: ParsedAnswer) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    calls = tuple((one.head.name, one.arguments) for one in answer.calls)
    return answer.content, answer.reasoning, calls


@pytest.mark.parametrize("options", [HELD, LIVE], ids=["held", "live"])
@pytest.mark.parametrize("name", SAMPLES)
def test_answers_mean_what_the_model_says(name: str, options: ParserOptions) -> None:
    sample = SAMPLES[name]
    answer = parsed(sample.text, parser_for(sample, options))
    assert meaning(answer) == (sample.content, sample.reasoning, sample.calls)
    assert [one.head.call_id for one in answer.calls] == [f"c{i}" for i in range(len(sample.calls))]


@pytest.mark.parametrize("options", [HELD, LIVE], ids=["held", "live"])
@pytest.mark.parametrize("name", SAMPLES)
def test_every_split_of_a_text_has_the_same_parts(name: str, options: ParserOptions) -> None:
    sample = SAMPLES[name]
    whole = parsed(sample.text, parser_for(sample, options))
    for at in range(len(sample.text) + 1):
        parser = parser_for(sample, options)
        parts = [*parser.feed(sample.text[:at]), *parser.feed(sample.text[at:]), *parser.finish()]
        assert joined(parts) == whole, sample.text[:at]
    parser = parser_for(sample, options)
    parts = [part for character in sample.text for part in parser.feed(character)]
    assert joined([*parts, *parser.finish()]) == whole


def test_arguments_are_shown_as_they_are_written() -> None:
    parser = parser_for(QWEN, LIVE)
    assert parser.feed('<tool_call>\n{"name": "add", "arguments": ') == []
    first, second = parser.feed('{"x"')
    assert (first.text, first.index, first.head and first.head.name) == ("", 0, "add")
    assert second == AnswerPart(PartKind.CALL, '{"x"', 0)
    assert parser.feed(": 1") == [AnswerPart(PartKind.CALL, ": 1", 0)]
    assert parser.feed("}}\n</tool_call>") == [AnswerPart(PartKind.CALL, "}", 0)]
    assert parser.finish() == []


MALFORMED = [
    "<tool_call>\n{not json}\n</tool_call>",
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "no JSON"}</tool_call>',
    '<tool_call>["add"]</tool_call>',
    "<tool_call></tool_call>",
    '<tool_call>{"name": "add"',
]


@pytest.mark.parametrize("options", [HELD, LIVE], ids=["held", "live"])
@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_calls_are_content(text: str, options: ParserOptions) -> None:
    answer = parsed(f"A {text} B", parser_for(QWEN, options))
    assert meaning(answer) == (f"A {text} B", "", ())


def test_calls_with_wrong_arguments_are_content_unless_they_are_shown_already() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"x": oops}}</tool_call>'
    assert meaning(parsed(text, parser_for(QWEN))) == (text, "", ())
    assert meaning(parsed(text, parser_for(QWEN, LIVE))) == ("", "", (("add", '{"x": oops}'),))


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"x": 1}, "name": "add"}', '{"x": 1}'),
        ('{"name": "add", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"name": "add", "parameters": {"x": 1}}', '{"x": 1}'),
        ('{"name": "add"}', "{}"),
        (
            '{"name": "add", "arguments": {"x": [1, {"y": "}"}], "z": "\\"}"}}',
            '{"x": [1, {"y": "}"}], "z": "\\"}"}',
        ),
    ],
)
@pytest.mark.parametrize("options", [HELD, LIVE], ids=["held", "live"])
def test_usual_variants_of_calls(call: str, arguments: str, options: ParserOptions) -> None:
    (found,) = parsed(f"<tool_call>{call}</tool_call>", parser_for(QWEN, options)).calls
    assert (found.head.name, json.loads(found.arguments)) == ("add", json.loads(arguments))


def test_deep_arguments_are_content_or_a_call_but_no_error() -> None:
    for depth in (100, 100_000):
        deep = '{"x": ' * depth + "1" + "}" * depth
        text = f'<tool_call>{{"arguments": {deep}, "name": "add"}}</tool_call>'
        answer = parsed(text, parser_for(QWEN))
        assert answer.content == ("" if answer.calls else text)
        assert bool(answer.calls) == (depth == 100)


def test_what_is_not_looked_for_is_content() -> None:
    without = parser_for(QWEN, ParserOptions(with_calls=False, with_reasoning=False))
    assert meaning(parsed(QWEN.text, without)) == (QWEN.text, "", ())
    hidden = parser_for(QWEN, ParserOptions(shows_reasoning=False))
    assert meaning(parsed(QWEN.text, hidden)) == ("I call.", "", QWEN.calls)


def test_calls_beyond_a_limit_are_dropped() -> None:
    one = parser_for(QWEN, ParserOptions(max_calls=1))
    assert meaning(parsed(QWEN.text, one))[2] == QWEN.calls[:1]


def test_a_parser_knows_whether_the_prompt_has_begun_reasoning() -> None:
    assert parser_for(SAMPLES["qwen, reasoning begun by the prompt"]).is_reasoning
    assert not parser_for(SAMPLES["qwen without reasoning"]).is_reasoning
    assert not parser_for(QWEN).is_reasoning


def test_a_prompt_without_the_mark_of_an_answer_is_not_read() -> None:
    parser = TemplateParser(template_for(QWEN), HELD, "a system prompt with <think>")
    assert not parser.is_reasoning


def test_ids_of_calls_are_nine_letters_and_digits() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_a_slow_pattern_is_an_error_not_a_hang() -> None:
    slow = template_of(
        {
            "start_anchor": "x",
            "fields": {"content": {}, "tool_calls": {"open_pattern": "(a|aa)+b", "content": "json"}},
        }
    )
    parser = TemplateParser(slow, HELD, "")
    with pytest.raises(RequestError, match="a pattern of the response template took more than"):
        parser.feed("a" * 4000 + "c")


def test_fields_without_text_are_an_error_not_a_hang() -> None:
    empty = {"open_pattern": "(?=a)", "close_pattern": "(?=a)"}
    still = template_of({"start_anchor": "x", "fields": {"content": {}, "thinking": empty}})
    parser = TemplateParser(still, HELD, "")
    with pytest.raises(RequestError, match="begin and end without a text"):
        parser.feed("an answer")


# transformers puts text of other fields beside the content.
@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "gpt-oss, text"])
def test_transformers_reads_the_same_by_the_same_template(name: str) -> None:
    from transformers.utils.chat_parsing import parse_response

    sample = SAMPLES[name]
    # White space after a call would replace the content before it.
    text = sample.text.replace("</tool_call>\n", "</tool_call>")
    ours = meaning(parsed(text, parser_for(sample)))
    theirs = parse_response(
        text,
        described(sample),
        prefix=sample.prompt,
        tools=[{"function": {"name": name, "parameters": one}} for name, one in PARAMETERS.items()],
    )
    calls = theirs.get("tool_calls", [])
    calls = [one for call in calls for one in (call if isinstance(call, list) else [call])]
    found = tuple((one["function"]["name"], one["function"]["arguments"]) for one in calls)
    assert (theirs.get("content", ""), theirs.get("reasoning_content", "")) == ours[:2]
    assert found == tuple((name, json.loads(arguments)) for name, arguments in ours[2])


def described(sample: Sample) -> dict[str, Any]:
    """The response template of a sample's family as JSON, with lists of calls."""
    fields = family_fields(sample.chat_template)
    calls = fields["fields"].get("tool_calls")
    if calls is not None:
        fields["fields"]["tool_calls"] = {**calls, "repeats": True}
    return fields


@pytest.mark.parametrize("options", [HELD, LIVE], ids=["held", "live"])
def test_marks_in_strings_of_arguments_are_text(options: ParserOptions) -> None:
    arguments = '{"x": 1, "y": "a \\"</tool_call><tool_call>"}'
    call = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    answer = parsed(f"{call}{call}", parser_for(QWEN, options))
    assert meaning(answer) == ("", "", (("add", arguments),) * 2)


def test_a_string_without_an_end_does_not_hide_later_calls() -> None:
    broken = '<tool_call>{"name": "add\n</tool_call>'
    answer = parsed(broken + QWEN.text.partition("I call.")[2], parser_for(QWEN))
    assert meaning(answer) == (broken, "", QWEN.calls)
