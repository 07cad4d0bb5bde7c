"""Histories with tool calls are rendered as by transformers, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.engine.tokenizer import load_tokenizer
from corun.runtime.errors import NotServedError, RequestError
from corun.runtime.frontend.codec import codec_of
from corun.runtime.frontend.tokenizer import Tokenizer
from corun.runtime.server.chat_messages import ConversationFields
from support.tokenizers import save_sample_tokenizer

# It writes every message alike, as many do, and calls as JSON.
WITH_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITHOUT_RESULTS = (
    "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls[0].function.name != 'add' %}"
    "{{ raise_exception('no such tool') }}{% endif %}{{ m.content }}{% endfor %}"
)
QUESTION = {"role": "user", "content": "1 + 2?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": [1, 2]}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c1"}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_sample_tokenizer("byte level", directory)
    return load_tokenizer(str(directory))


def render(hf: Any, source: str, *messages: Any) -> str:
    tokenizer = Tokenizer(codec_of(hf, chat_template=source))
    return ConversationFields().render(tokenizer, list(messages), 1000)


def test_calls_and_results_are_written(hf: Any) -> None:
    text = render(hf, WITH_CALLS, QUESTION, CALLS, RESULT)
    assert text == '<user>1 + 2?<assistant>add{"x": [1, 2]}<tool>3<assistant>'
    arguments = json.loads(str(CALL["function"]["arguments"]))  # type: ignore[index]
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    theirs = [QUESTION, CALLS | {"content": "", "tool_calls": [call]}, RESULT | {"content": "3"}]
    assert text == hf.apply_chat_template(theirs, tokenize=False, add_generation_prompt=True)


def test_results_have_the_name_of_their_function(hf: Any) -> None:
    named = "{% for m in messages %}<{{ m.name }}>{{ m.content }}{% endfor %}" + WITH_CALLS
    assert render(hf, named, QUESTION, CALLS, RESULT).startswith("<>1 + 2?<><add>3")
    other = RESULT | {"name": "sum"}
    assert render(hf, named, QUESTION, CALLS, other).startswith("<>1 + 2?<><sum>3")
    other = RESULT | {"tool_call_id": "c2"}
    assert render(hf, named, QUESTION, CALLS, other).startswith("<>1 + 2?<><>3")


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_calls_without_arguments(hf: Any, arguments: Any) -> None:
    call = {"function": {"name": "now", "arguments": arguments}}
    text = render(hf, WITH_CALLS, QUESTION, {"role": "assistant", "tool_calls": [call]})
    assert text == "<user>1 + 2?<assistant>now{}<assistant>"


def test_what_a_template_leaves_out_is_refused(hf: Any) -> None:
    with pytest.raises(NotServedError, match="tool_calls, which the model's chat template leaves"):
        render(hf, WITHOUT_CALLS, QUESTION, CALLS)
    assert render(hf, WITHOUT_CALLS, QUESTION, RESULT) == "<user>1 + 2?<tool>3"
    with pytest.raises(NotServedError, match='the role "tool", which the model'):
        render(hf, WITHOUT_RESULTS, QUESTION, RESULT)
    assert render(hf, WITHOUT_RESULTS, QUESTION, CALLS | {"tool_calls": []})


def test_a_template_that_refuses_other_calls_has_read_them(hf: Any) -> None:
    assert render(hf, STRICT, QUESTION, CALLS) == "1 + 2?"
    other = CALLS | {"tool_calls": [CALL | {"function": {"name": "sub", "arguments": ""}}]}
    with pytest.raises(RequestError, match="no such tool"):
        render(hf, STRICT, QUESTION, other)
