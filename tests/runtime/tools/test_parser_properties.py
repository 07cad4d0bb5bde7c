"""Any text, cut anywhere: no error, the same parts as of the whole, and nothing is lost."""

from itertools import pairwise

import pytest
from corun.runtime.tools.families import family_format
from corun.runtime.tools.parser import ParserOptions, TemplateParser
from corun.runtime.tools.parts import ParsedAnswer, joined
from hypothesis import given, settings
from hypothesis import strategies as st
from support.answer_samples import SAMPLES

FAMILIES = sorted({sample.chat_template for sample in SAMPLES.values()})
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    "<|constrain|>json",
    "<|tool_call>call:f",
    "<tool_call|>",
    "<function=f>",
    "<parameter=x>",
    "</parameter>",
    "</function>",
    "<arg_key>",
    "</arg_key>",
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name": "f", "parameters": {"y": "a"}}',
    "[",
    "]",
    '{"name"',
    '"f"',
    '"arguments": ',
    "{",
    "}",
    '"',
    "\\",
    ",",
    ":",
    "\n",
    " ",
    "a",
    "<",
    "é",
    "1",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def answer(chat_template: str, pieces: list[str], options: ParserOptions) -> ParsedAnswer:
    found = family_format(chat_template)
    assert found is not None
    parser = TemplateParser(found.template, options, "", lambda: "id")
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*parts, *parser.finish()])


@pytest.mark.parametrize("is_live", [False, True], ids=["held", "live"])
@settings(max_examples=250)
@given(chat_template=st.sampled_from(FAMILIES), text=TEXTS, cuts=st.lists(st.integers(0, 99)))
def test_cuts_change_nothing(chat_template: str, text: str, cuts: list[int], is_live: bool) -> None:
    options = ParserOptions(is_live=is_live)
    whole = answer(chat_template, [text], options)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert answer(chat_template, [text[a:b] for a, b in pairwise(places)], options) == whole
    assert answer(chat_template, list(text), options) == whole


@settings(max_examples=250)
@given(chat_template=st.sampled_from(FAMILIES), text=TEXTS)
def test_text_that_is_not_looked_for_is_content(chat_template: str, text: str) -> None:
    if "<|channel|>" in chat_template:  # it has marks of content
        return
    nothing = ParserOptions(with_calls=False, with_reasoning=False)
    assert answer(chat_template, [text], nothing).content == text.strip()
