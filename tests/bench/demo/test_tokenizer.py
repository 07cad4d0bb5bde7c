"""The byte tokenizer and the chat template agree with the corpus and lose nothing."""

from pathlib import Path

import jinja2
import pytest
from corun.runtime.demo import chat_prompt
from demo.chat import NUM_BYTES, SPECIAL_IDS, VOCAB_SIZE, encode_text
from demo.corpus import conversation
from demo.tokenizer import save_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, max_length=512)
    return AutoTokenizer.from_pretrained(directory)


def test_it_is_fast_and_has_one_token_per_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.is_fast
    assert len(tokenizer) == VOCAB_SIZE == NUM_BYTES + len(SPECIAL_IDS)
    assert {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_IDS} == SPECIAL_IDS


@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=st.text(max_size=40))
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = tokenizer(text)["input_ids"]
    assert tokens == encode_text(text)
    assert tokenizer.decode(tokens) == text


def test_template_corpus_and_chat_prompt_agree(tokenizer: PreTrainedTokenizerFast) -> None:
    user = {"role": "user", "content": "ab cd"}
    answered = [{"role": "system", "content": "upper"}, user, {"role": "assistant", "content": "AB CD"}]
    sample = conversation([("ab cd", "AB CD")], system="upper")
    assert tuple(tokenizer.apply_chat_template(answered)["input_ids"]) == sample.tokens
    prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    assert prompt == chat_prompt("ab cd")


def test_unknown_roles_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
