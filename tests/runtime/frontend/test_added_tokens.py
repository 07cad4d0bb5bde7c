"""The base's tokenizer with the tokens that an adapter's tokenizer adds."""

from pathlib import Path

import pytest
import tokenizers
from corun.runtime.adapters.vocabulary import AddedToken, TokenDifferences
from corun.runtime.engine.tokenizer import load_tokenizer
from corun.runtime.errors import RequestError
from corun.runtime.frontend.adapter_conventions import with_added
from corun.runtime.frontend.chat_template import ChatTemplate
from corun.runtime.frontend.codec import Codec, PlainCodec, TransformersCodec
from support.fake_core import BOS_ID, EOS_ID, save_tokenizer

NUM_EMBEDDINGS = 270  # ids are bytes, BOS_ID and EOS_ID
NEAR, FAR = (
    AddedToken("<near>", 265, special=True),
    AddedToken("<far>", 270, normalized=False, special=True),
)
WORD = AddedToken("<word>", 258, normalized=False)


@pytest.fixture(scope="module", params=["plain", "transformers"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Codec:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    if request.param == "transformers":
        return TransformersCodec(load_tokenizer(str(directory)))
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return PlainCodec(backend, ChatTemplate(None, {}))


def codec(base: Codec, *tokens: AddedToken, missing_ids: tuple[int, ...] = ()) -> Codec:
    return with_added(base, TokenDifferences(tokens, missing_ids), NUM_EMBEDDINGS)


def encode(codec: Codec, text: str) -> list[int]:
    return codec.encode(text, add_special_tokens=False)


def test_an_added_token_has_the_id_of_the_adapter(base: Codec) -> None:
    own = codec(base, NEAR, FAR)
    assert encode(own, "a<near>b") == [ord("a"), 265, ord("b")]
    assert encode(base, "<near>") == list(b"<near>")  # which is as it was
    assert encode(own, "plain </s>") == [*b"plain ", EOS_ID]


def test_texts_show_an_added_token_unless_special_ones_are_left_out(base: Codec) -> None:
    own = codec(base, WORD, NEAR)
    ids = [ord("a"), 265, 258, ord("b")]
    assert own.decoding(skip_special_tokens=False)(ids) == "a<near><word>b"
    assert own.decoding(skip_special_tokens=True)(ids) == "a<word>b"
    assert own.token_name(265) == "<near>"
    assert own.special_tokens()[265].content == "<near>"
    assert BOS_ID in own.special_tokens()


@pytest.mark.parametrize("beside", [(), (NEAR,)])
def test_a_token_without_an_embedding_refuses_the_prompt_that_holds_it(
    base: Codec, beside: tuple[AddedToken, ...]
) -> None:
    own = codec(base, *beside, FAR)
    assert encode(own, "far") == list(b"far")
    with pytest.raises(RequestError, match=r"'<far>'.*id 270.*ids 0 to 269") as raised:
        encode(own, "a<far>")
    assert raised.value.param == "prompt"


def test_a_token_that_the_adapter_does_not_have_refuses_the_prompt(base: Codec) -> None:
    own = codec(base, missing_ids=(EOS_ID,))
    assert encode(own, "s") == list(b"s")
    with pytest.raises(RequestError, match=r"'</s>'.*and the adapter's has not"):
        encode(own, "a</s>")


def test_a_word_of_the_base_is_found_whole(base: Codec) -> None:
    own = codec(base, AddedToken("b", ord("b")))
    assert encode(own, "abc") == list(b"abc")


def test_space_around_a_token_goes_as_its_tokenizer_says(base: Codec) -> None:
    own = codec(base, AddedToken("<x>", 258, lstrip=True, rstrip=True, normalized=False))
    assert encode(own, "a <x> b") == [ord("a"), 258, ord("b")]
