"""Chat templates and end tokens in the folders of adapters."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from corun.runtime.demo import demo_model_path
from corun.runtime.errors import RequestError
from corun.runtime.frontend.adapter_conventions import AdapterConventions, Conventions
from corun.runtime.frontend.chat_template import ChatTemplate
from corun.runtime.frontend.codec import PlainCodec

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
BASE_TOKENIZER = demo_model_path() / "tokenizer.json"


@pytest.fixture(scope="module")
def codec() -> PlainCodec:
    backend = tokenizers.Tokenizer.from_file(str(BASE_TOKENIZER))
    return PlainCodec(backend, ChatTemplate("{{ messages }}", {"bos_token": "<s>"}))


def write(folder: Path, **files: Any) -> None:
    """Files by name, "." written as "_"; what is no text as JSON."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)


def found(codec: PlainCodec, folder: Path, *, is_on: bool = True) -> Conventions:
    return asyncio.run(AdapterConventions(codec, is_on=is_on).of(str(folder)))


def text_of(conventions: Conventions) -> str:
    return conventions.apply_chat_template(HELLO)


def test_a_file_of_its_own_goes_before_a_field(codec: PlainCodec, tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config_json={"chat_template": "of the field"})
    assert text_of(found(codec, tmp_path)) == "of the field"
    write(tmp_path, chat_template_jinja=TEMPLATE)
    assert text_of(found(codec, tmp_path)) == "<s>[hello]"
    assert found(codec, tmp_path, is_on=False) == Conventions()


def test_templates_by_name(codec: PlainCodec, tmp_path: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "no"}]
    write(tmp_path, tokenizer_config_json={"chat_template": templates})
    assert text_of(found(codec, tmp_path)) == "<s>[hello]"


@pytest.mark.parametrize(("given", "expected"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_end_tokens(codec: PlainCodec, tmp_path: Path, given: Any, expected: Any) -> None:
    write(tmp_path, generation_config_json={"eos_token_id": given, "temperature": 0.7})
    conventions = found(codec, tmp_path)
    assert (conventions.template, conventions.eos_token_ids) == (None, expected)


def test_a_folder_without_any_has_those_of_the_base(codec: PlainCodec, tmp_path: Path) -> None:
    assert found(codec, tmp_path) == Conventions()
    assert found(codec, tmp_path / "nowhere") == Conventions()
    assert asyncio.run(AdapterConventions(codec, is_on=True).of(None)) == Conventions()


def test_the_base_tokenizer_beside_it_is_no_other(codec: PlainCodec, tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja=TEMPLATE, tokenizer_json=BASE_TOKENIZER.read_text())
    assert found(codec, tmp_path).template is not None


def _other_vocabulary() -> dict[str, Any]:
    tokenizer: dict[str, Any] = json.loads(BASE_TOKENIZER.read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|other|>"
    return tokenizer


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_json": _other_vocabulary()}, "its vocabulary is another"),
        (
            {"tokenizer_config_json": {"added_tokens_decoder": {"1": {"content": "<|x|>"}}}},
            "token 1 is '<|x|>' there",
        ),
        ({"tokenizer_config_json": "{"}, "cannot be read"),
        ({"generation_config_json": [1]}, "no JSON object"),
        ({"generation_config_json": {"eos_token_id": "x"}}, "cannot be read"),
        ({"tokenizer_json": {"model": {}}}, "cannot be read"),
    ],
)
def test_those_of_other_tokens_are_left_and_it_is_said(
    codec: PlainCodec, tmp_path: Path, caplog: pytest.LogCaptureFixture, files: Any, reason: str
) -> None:
    write(tmp_path, chat_template_jinja=TEMPLATE, **files)
    with caplog.at_level(logging.WARNING):
        assert found(codec, tmp_path) == Conventions()
    assert reason in caplog.text


def test_a_template_that_refuses_is_the_requests_fault(codec: PlainCodec, tmp_path: Path) -> None:
    write(tmp_path, chat_template_jinja="{{ raise_exception('no system message') }}")
    with pytest.raises(RequestError, match=r"adapter's chat template refuses.*no system message"):
        text_of(found(codec, tmp_path))


def test_files_are_read_again_when_they_have_changed(codec: PlainCodec, tmp_path: Path) -> None:
    conventions = AdapterConventions(codec, is_on=True, look_every_s=-1.0)

    def now() -> Conventions:
        return asyncio.run(conventions.of(str(tmp_path)))

    write(tmp_path, chat_template_jinja="one")
    first = now()
    assert text_of(first) == "one"
    assert now() is first
    write(tmp_path, chat_template_jinja="two")
    os.utime(tmp_path / "chat_template.jinja", ns=(1, 1))
    assert text_of(now()) == "two"
