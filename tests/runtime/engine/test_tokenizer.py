"""Tokenizers that an engine can describe, and errors of loading one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.engine.tokenizer import load_tokenizer, plain_backend, read_tokenizer, spec_of
from corun.runtime.errors import ModelError
from support.tokenizers import save_sample_tokenizer
from tokenizers import NormalizedString, PreTokenizedString
from tokenizers.pre_tokenizers import PreTokenizer


def load(directory: Path, **options: Any) -> Any:
    save_sample_tokenizer("byte level", directory, **options)
    return load_tokenizer(str(directory))


class Whole:
    """A part of a tokenizer that is written in Python."""

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(self.split)

    def split(self, number: int, text: NormalizedString) -> list[NormalizedString]:
        return [text]


def test_what_is_told(tmp_path: Path) -> None:
    hf = load(tmp_path, chat_template=[{"name": "default", "template": "x"}])
    spec = spec_of(hf)
    assert spec is not None
    assert spec.backend == hf.backend_tokenizer.to_str()
    assert spec.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert spec.chat_template == {"default": "x"}


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.json"
    file.write_text('{"chat_template": "x"}')
    spec = spec_of(load(tmp_path))
    assert spec is not None and spec.chat_template == "x"
    assert load(tmp_path, chat_template="y").chat_template == "y"


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"chat_template": {}}'])
def test_a_damaged_template_of_a_processor(tmp_path: Path, content: str) -> None:
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(ModelError, match=r"chat_template\.json of"):
        load(tmp_path)


def test_one_in_python_is_not_told() -> None:
    class Slow:
        is_fast = False

    assert plain_backend(Slow()) is None
    assert spec_of(Slow()) is None


@pytest.mark.parametrize("differs_at", [True, False])
def test_one_that_changes_tokens_in_python_is_not_told(tmp_path: Path, differs_at: bool) -> None:
    hf = load(tmp_path)

    class Changed:
        is_fast = True
        backend_tokenizer = hf.backend_tokenizer

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            ids: list[int] = hf.encode(text, add_special_tokens=add_special_tokens)
            return ids[1:] if add_special_tokens is differs_at else ids

    assert spec_of(Changed()) is None


def test_one_that_cuts_special_tokens_is_not_told(tmp_path: Path) -> None:
    hf = load(tmp_path, split_special_tokens=True)
    assert plain_backend(hf) is not None
    assert spec_of(hf) is None


def test_one_with_a_part_in_python_is_not_told(tmp_path: Path) -> None:
    hf = load(tmp_path)
    hf.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Whole())
    assert plain_backend(hf) is not None
    assert spec_of(hf) is None


def test_a_directory_without_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_two_threads_load_at_once() -> None:
    program = (
        "import threading, time\n"
        "from corun.runtime.errors import ModelError\n"
        "from corun.runtime.engine.tokenizer import load_tokenizer\n"
        "def load():\n"
        "    try:\n"
        "        load_tokenizer('/no/such/directory')\n"
        "    except ModelError as error:\n"
        "        print(error)\n"
        "threading.Thread(target=load).start()\n"
        "time.sleep(0.05)\n"
        "load()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = done.stdout.count("cannot load a tokenizer from '/no/such/directory': ")
    assert said == 2, (done.stdout, done.stderr)
    assert "ImportError" not in done.stdout + done.stderr


def test_the_tokens_of_the_base_are_told_and_code_of_a_tokenizer_is_not(tmp_path: Path) -> None:
    save_sample_tokenizer("byte level", tmp_path)
    told, untold = (read_tokenizer(str(tmp_path), 999, trust_remote_code=trusts) for trusts in (False, True))
    assert told.spec is not None and untold.spec is None
    assert told.backend == untold.backend == told.spec.backend
    assert told.tokens == untold.tokens
    tokens = told.tokens
    assert {"<|begin|>", "<|end|>", "<tool>"} <= tokens.added
    assert tokens.ids["<|end|>"] == tokens.eos_token_id
    assert tokens.contents[tokens.ids["<tool>"]] == "<tool>"
    assert tokens.num_embeddings == 999
