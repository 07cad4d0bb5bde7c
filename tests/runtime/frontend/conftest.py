"""A tokenizer for the tests of the front ends: token ids are bytes."""

from pathlib import Path

import pytest
from corun.runtime.engine.tokenizer import load_tokenizer
from corun.runtime.frontend.codec import codec_of
from corun.runtime.frontend.tokenizer import Tokenizer
from support.fake_core import save_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer."""
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return save_tokenizer(directory, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def template_less(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer without a chat template."""
    directory: Path = tmp_path_factory.mktemp("template-less")
    return Tokenizer(codec_of(load_tokenizer(save_tokenizer(directory))))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: str) -> Tokenizer:
    """The tokenizer in that directory."""
    return Tokenizer(codec_of(load_tokenizer(tokenizer_dir)))
