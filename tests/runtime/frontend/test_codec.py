"""A tokenizer made from an engine's data gives the results of transformers' own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from corun.runtime.demo import demo_model_path
from corun.runtime.engine.messages import TokenizerSpec
from corun.runtime.engine.tokenizer import load_tokenizer, spec_of
from corun.runtime.frontend.codec import Codec, PlainCodec, codec_from_spec, codec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support.architectures import ARCHITECTURES
from support.fake_core import save_tokenizer
from support.tokenizers import SAMPLE_KINDS, WORDS, save_sample_tokenizer, save_word_tokenizer

# The tokenizer that transformers makes also depends on the model's type.
MODEL_TYPES = {one.model_type: one for one in ARCHITECTURES.values()}
SENTENCEPIECE = {"llama", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral"}
MARKS = [
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    ".",
    ",",
    "!",
    "é",
    "e\u0301",
    "ﬁ",
    "\u200b",
    "\u00a0",
    "😀",
    "👩‍👩‍👧",
    "\x00",
    "\ufffd",
    "▁",
    "Ġ",
    "t1 t2",
    "<tool>",
    " <tool> ",
    "<s>",
    "</s>",
    "<unk>",
    "<|begin|>",
    "<|end|>",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "<0xE4>",
    "<|user|>",
]
TEXTS = st.lists(st.one_of(st.sampled_from([*WORDS, *MARKS]), st.text(max_size=6)), max_size=12)


@dataclass
class Pair:
    """One tokenizer, made in both ways."""

    made: Codec
    hf: Any


def pair_of(directory: Path) -> Pair:
    hf = load_tokenizer(str(directory))
    spec = spec_of(hf)
    assert spec is not None
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=TokenizerSpec)
    return Pair(codec_from_spec(told), hf)


def save(name: str, directory: Path) -> Path:
    if name == "demo":
        return demo_model_path()
    if name == "words":
        save_word_tokenizer(directory, 96)
    elif name == "bytes":
        save_tokenizer(directory)
    elif name in SAMPLE_KINDS:
        save_sample_tokenizer(name, directory, tokenizer_class="PreTrainedTokenizerFast")
    else:
        kind = "sentencepiece" if name in SENTENCEPIECE else "byte level"
        save_sample_tokenizer(kind, directory)
        MODEL_TYPES[name].config().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["demo", "words", "bytes", *SAMPLE_KINDS, *MODEL_TYPES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(save(request.param, tmp_path_factory.mktemp("tokenizer")))


def check_ids_and_texts(pair: Pair, text: str) -> None:
    for with_special in (True, False):
        ids = pair.made.encode(text, add_special_tokens=with_special)
        assert ids == pair.hf.encode(text, add_special_tokens=with_special)
        for tokens in (ids, ids[::-1]):
            for skip in (True, False):
                expected = pair.hf.decode(
                    tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
                assert pair.made.decoding(skip_special_tokens=skip)(tokens) == expected
        assert [*map(pair.made.token_name, ids)] == pair.hf.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("num_texts", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_ids_and_texts_are_those_of_transformers(pair: Pair, num_texts: int) -> None:
    assert isinstance(pair.made, PlainCodec)

    @settings(max_examples=num_texts, deadline=None, derandomize=True, database=None)
    @given(TEXTS)
    def check(parts: list[str]) -> None:
        check_ids_and_texts(pair, "".join(parts))

    check()


def test_every_architecture_is_among_them() -> None:
    assert len(MODEL_TYPES) == 13


def test_ids_that_are_no_tokens_have_no_name(pair: Pair) -> None:
    assert pair.made.token_name(1 << 30) is None


@pytest.fixture
def template_tokenizer(tmp_path: Path) -> Any:
    save_sample_tokenizer("sentencepiece", tmp_path, chat_template="{{ bos_token }}own")
    return load_tokenizer(str(tmp_path))


def test_a_given_chat_template_replaces_the_tokenizers(template_tokenizer: Any) -> None:
    spec = spec_of(template_tokenizer)
    assert spec is not None
    given_one = "{{ bos_token }}given"
    own = [codec_from_spec(spec), codec_of(template_tokenizer)]
    replaced = [
        codec_from_spec(spec, chat_template=given_one),
        codec_of(template_tokenizer, chat_template=given_one),
    ]
    for codecs, expected in ((own, "<s>own"), (replaced, "<s>given")):
        for codec in codecs:
            assert codec.has_chat_template
            assert codec.render([{"role": "user"}], add_generation_prompt=True) == expected


def test_a_given_response_template_replaces_the_tokenizers(tmp_path: Path) -> None:
    own_one, given_one = {"fields": {"content": {}}, "start_anchor": "own"}, '{"start_anchor": "x"}'
    save_sample_tokenizer("sentencepiece", tmp_path, response_template=own_one)
    hf = load_tokenizer(str(tmp_path))
    spec = spec_of(hf)
    assert spec is not None
    for codec in (codec_from_spec(spec), codec_of(hf)):
        assert codec.template.response_template == json.dumps(own_one)
    for codec in (
        codec_from_spec(spec, response_template=given_one),
        codec_of(hf, response_template=given_one),
    ):
        assert codec.template.response_template == given_one


def test_marks_are_added_tokens_that_are_special_or_in_brackets(pair: Pair) -> None:
    marks = pair.made.mark_ids()
    assert ("<tool>" in marks) == ("<tool>" in pair.hf.get_vocab())
    assert marks == {text: pair.hf.convert_tokens_to_ids(text) for text in marks}
    assert set(pair.hf.all_special_tokens) <= marks.keys()
