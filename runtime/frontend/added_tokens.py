"""The base's tokenizer with the tokens that an adapter's tokenizer adds.

``tokenizers`` gives new tokens the next free ids. The adapter may use other ids, so ids are
translated in both directions.
"""

from collections.abc import Mapping, Sequence

import tokenizers

from ..adapters.vocabulary import AddedToken, TokenDifferences
from ..errors import RequestError
from .codec import Codec
from .detokenizer import Decode
from .long_text import TextPiece
from .special_stops import SpecialToken


class AddedTokensCodec:
    """See ``Codec``."""

    def __init__(
        self, codec: Codec, ids: Mapping[int, int], tokens: TokenDifferences, num_embeddings: int
    ) -> None:
        """``codec``: the base's with the added tokens; ``ids``: the adapter's ids, by the codec's.

        Without ``ids``, ``codec`` is the base's own, and no added token has an embedding.
        """
        self._codec = codec
        self.is_quick, self.has_chat_template = codec.is_quick, codec.has_chat_template
        self.special_tokens_map = codec.special_tokens_map
        self.with_tokens, self.render = codec.with_tokens, codec.render
        self.template = codec.template
        self._ids = {inner: outer for inner, outer in ids.items() if inner != outer}
        self._inner_ids = {outer: inner for inner, outer in self._ids.items()}
        self._added = {token.token_id: token.content for token in tokens.added}
        self._refused = set(tokens.missing_ids)
        self._refused.update(one for one in self._added if one >= num_embeddings)
        self._refused_texts = {} if ids else {text: one for one, text in self._added.items()}
        self._num_embeddings = num_embeddings

    def mark_ids(self) -> Mapping[str, int]:
        outer = {text: self._ids.get(one, one) for text, one in self._codec.mark_ids().items()}
        return {text: one for text, one in outer.items() if one not in self._refused}

    def special_tokens(self) -> Mapping[int, SpecialToken]:
        found = self._codec.special_tokens()
        return {self._ids.get(inner, inner): token for inner, token in found.items()}

    def added_tokens(self) -> Mapping[int, str]:
        found = self._codec.added_tokens()
        return {self._ids.get(inner, inner): content for inner, content in found.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises ``RequestError`` for a token that the base or the adapter lacks."""
        self._check_text(text)
        return self._outer(self._codec.encode(text, add_special_tokens=add_special_tokens))

    def encode_piece(self, text: str) -> TextPiece:
        """Raises ``RequestError`` as ``encode`` does."""
        self._check_text(text)
        piece = self._codec.encode_piece(text)
        return TextPiece(self._outer(piece.token_ids), piece.starts)

    def _check_text(self, text: str) -> None:
        for content, token_id in self._refused_texts.items():
            if content in text:
                raise self._refusal(token_id)

    def _outer(self, token_ids: list[int]) -> list[int]:
        """Return the adapter's ids for the codec's. Raises ``RequestError`` for a refused one."""
        if self._ids:
            token_ids = [self._ids.get(one, one) for one in token_ids]
        if not self._refused.isdisjoint(token_ids):
            raise self._refusal(next(one for one in token_ids if one in self._refused))
        return token_ids

    def decoding(self, *, skip_special_tokens: bool) -> Decode:
        decode = self._codec.decoding(skip_special_tokens=skip_special_tokens)
        inner_ids = self._inner_ids
        if not inner_ids:
            return decode

        def translated(token_ids: Sequence[int]) -> str:
            return decode([inner_ids.get(one, one) for one in token_ids])

        return translated

    def token_name(self, token_id: int) -> str | None:
        return self._codec.token_name(self._inner_ids.get(token_id, token_id))

    def _refusal(self, token_id: int) -> RequestError:
        content = self._added.get(token_id)
        if content is None:
            content = self._codec.token_name(token_id)
            why = "which the base's tokenizer has and the adapter's has not"
        else:
            why = (
                f"which the adapter's tokenizer has added (id {token_id}): the base model has "
                f"embeddings only of ids 0 to {self._num_embeddings - 1}"
            )
        return RequestError(f"the prompt contains the token {content!r}, {why}", param="prompt")


def with_added(base: Codec, tokens: TokenDifferences, num_embeddings: int) -> Codec:
    """Return ``base`` with the tokens of an adapter. Slow if one of them has an embedding."""
    if all(_is_text_alone(one, num_embeddings) for one in tokens.added):
        return AddedTokensCodec(base, {}, tokens, num_embeddings)
    codec, ids = base.with_tokens([_token(one) for one in tokens.added])
    outer = {ids[one.content]: one.token_id for one in tokens.added}
    return AddedTokensCodec(codec, outer, tokens, num_embeddings)


def _is_text_alone(token: AddedToken, num_embeddings: int) -> bool:
    """Whether the token is refused wherever its text occurs in a prompt."""
    return token.token_id >= num_embeddings and not (token.normalized or token.single_word)


def _token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
        normalized=token.normalized, special=token.special,
    )  # fmt: skip
