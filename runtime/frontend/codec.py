"""Tokenizers, by the ``tokenizers`` package alone or by transformers."""

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import tokenizers

from ..engine.messages import TokenizerSpec
from ..engine.tokenizer import plain_backend, response_template_of
from .chat_template import ChatTemplate, Render
from .detokenizer import Decode
from .long_text import TextPiece
from .special_stops import SpecialToken
from .template_limits import leave_to_thread


class Codec(Protocol):
    """Text to tokens and back, and the model's chat template, without checks."""

    @property
    def is_quick(self) -> bool:
        """Whether ``encode`` is fast and thread-safe."""

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render`` can be used."""

    @property
    def template(self) -> ChatTemplate:
        """The chat template, for what it contains; ``render`` may be code of the tokenizer."""

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Special tokens by their names in chat templates, such as ``bos_token``."""

    def with_tokens(self, tokens: Sequence[tokenizers.AddedToken]) -> "tuple[Codec, Mapping[str, int]]":
        """Return a copy that also finds these tokens in texts, and their ids in it. Slow."""

    def mark_ids(self) -> Mapping[str, int]:
        """Return the added tokens that are special or written as <…>: grammars use their ids."""

    def special_tokens(self) -> Mapping[int, SpecialToken]:
        """Return the tokens that ``decoding`` can skip, by id. Slow."""

    def added_tokens(self) -> Mapping[int, str]:
        """Return the tokens that are found in texts as a whole, by id. Slow."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of ``text``, which is valid Unicode."""

    def encode_piece(self, text: str) -> TextPiece:
        """Return the tokens of ``text`` without special ones, and where each begins."""

    def decoding(self, *, skip_special_tokens: bool) -> Decode:
        """Return the function from tokens to their text."""

    def token_name(self, token_id: int) -> str | None:
        """Return a token's entry in the vocabulary; None if there is no such token."""

    @property
    def render(self) -> Render:
        """The function that renders messages. Raises one of ``chat_template.RENDER_ERRORS``."""


class PlainCodec:
    """A tokenizer that is implemented entirely by its Rust backend."""

    is_quick = True

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate) -> None:
        self._backend = backend
        self.template = template
        self.render = template.render

    @property
    def has_chat_template(self) -> bool:
        return bool(self.template.source)

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        return self.template.special_tokens

    def with_tokens(self, tokens: Sequence[tokenizers.AddedToken]) -> tuple[Codec, Mapping[str, int]]:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_tokens(list(tokens))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        ids = {token.content: vocabulary[token.content] for token in tokens}
        return PlainCodec(backend, self.template), ids

    def mark_ids(self) -> Mapping[str, int]:
        return _marks(self._backend.get_added_tokens_decoder())

    def special_tokens(self) -> Mapping[int, SpecialToken]:
        return _special(self._backend.get_added_tokens_decoder())

    def added_tokens(self) -> Mapping[int, str]:
        return _contents(self._backend.get_added_tokens_decoder())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_piece(self, text: str) -> TextPiece:
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        return TextPiece(list(encoding.ids), [start for start, _ in encoding.offsets])

    def decoding(self, *, skip_special_tokens: bool) -> Decode:
        return partial(self._backend.decode, skip_special_tokens=skip_special_tokens)

    def token_name(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)


class TransformersCodec:
    """A tokenizer that is partly implemented in Python."""

    is_quick = False

    def __init__(self, hf: Any) -> None:
        """``hf``: the tokenizer of transformers."""
        from transformers import PreTrainedTokenizerBase

        self._hf = hf
        # A tokenizer that renders conversations with code of its own is not limited.
        own = getattr(type(hf), "apply_chat_template", None)
        self.render: Render = self._render
        if own is PreTrainedTokenizerBase.apply_chat_template:
            self.render = self.template.render

    @cached_property
    def template(self) -> ChatTemplate:
        return _template_of(self._hf)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        found: dict[str, str] = self._hf.special_tokens_map
        return found

    def with_tokens(self, tokens: Sequence[tokenizers.AddedToken]) -> tuple[Codec, Mapping[str, int]]:
        hf = copy.deepcopy(self._hf)
        hf.add_tokens(list(tokens))
        ids = {token.content: hf.convert_tokens_to_ids(token.content) for token in tokens}
        return TransformersCodec(hf), ids

    def mark_ids(self) -> Mapping[str, int]:
        return _marks(self._hf.added_tokens_decoder)

    def special_tokens(self) -> Mapping[int, SpecialToken]:
        named = {
            token_id: SpecialToken(name)
            for token_id in self._hf.all_special_ids
            if (name := self.token_name(token_id))
        }
        return named | _special(self._hf.added_tokens_decoder)

    def added_tokens(self) -> Mapping[int, str]:
        return _contents(self._hf.added_tokens_decoder)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def encode_piece(self, text: str) -> TextPiece:
        return TextPiece(self.encode(text, add_special_tokens=False), None)

    def decoding(self, *, skip_special_tokens: bool) -> Decode:
        def decode(token_ids: Sequence[int]) -> str:
            text = self._hf.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            return str(text)

        return decode

    def token_name(self, token_id: int) -> str | None:
        name = self._hf.convert_ids_to_tokens(token_id)
        return None if name is None else str(name)

    def _render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        leave_to_thread()  # its code is not limited
        copies = [dict(message) for message in messages]
        return str(self._hf.apply_chat_template(copies, tokenize=False, **variables))


def _marks(added: Mapping[int, Any]) -> dict[str, int]:
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.content
        and (token.special or (token.content.startswith("<") and token.content.endswith(">")))
    }


def _special(added: Mapping[int, Any]) -> dict[int, SpecialToken]:
    return {
        token_id: SpecialToken(token.content, token.lstrip, token.rstrip)
        for token_id, token in added.items()
        if token.special and token.content
    }


def _contents(added: Mapping[int, Any]) -> dict[int, str]:
    return {token_id: str(token.content) for token_id, token in added.items()}


def codec_from_spec(
    spec: TokenizerSpec, *, chat_template: str | None = None, response_template: str | None = None
) -> Codec:
    """Make the tokenizer that an engine process has described, without transformers.

    ``chat_template`` and ``response_template`` replace its own.
    """
    source = spec.chat_template if chat_template is None else chat_template
    answers = spec.response_template if response_template is None else response_template
    backend = tokenizers.Tokenizer.from_str(spec.backend)
    return PlainCodec(backend, ChatTemplate(source, spec.special_tokens, answers))


def codec_of(hf: Any, *, chat_template: str | None = None, response_template: str | None = None) -> Codec:
    """Use the tokenizer ``hf`` of transformers.

    ``chat_template`` and ``response_template`` replace its own.
    """
    if chat_template is not None:
        hf.chat_template = chat_template
    if response_template is not None:
        hf.response_template = json.loads(response_template)
    backend = plain_backend(hf)
    if backend is None:
        return TransformersCodec(hf)
    return PlainCodec(backend, _template_of(hf))


def _template_of(hf: Any) -> ChatTemplate:
    return ChatTemplate(hf.chat_template, hf.special_tokens_map, response_template_of(hf))
