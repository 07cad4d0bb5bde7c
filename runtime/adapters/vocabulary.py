"""Compares an adapter's tokenizer with the base's: same tokens, and added ones. Pure.

Trainers add tokens (for padding, or to mark turns). A tokenizer that keeps the base's ids makes the
same tokens of all texts without added tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import msgspec

MAX_ADDED_TOKENS = 1024
_MAX_CHARS_SHOWN = 60


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in a text before it is split into words, as in ``tokenizers``."""

    content: str
    token_id: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = msgspec.field(name="id")
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


@dataclass(frozen=True)
class BaseTokens:
    """The tokens of the base model."""

    ids: Mapping[str, int]  # by content, including added tokens
    added: frozenset[str]  # contents of added tokens
    eos_token_id: int | None
    num_embeddings: int  # lower ids have an embedding

    def with_embeddings(self, number: int) -> "BaseTokens":
        """Return the same tokens, with embeddings of an adapter's vocabulary."""
        return replace(self, num_embeddings=number)

    @cached_property
    def contents(self) -> Mapping[int, str]:
        return {token_id: content for content, token_id in self.ids.items()}


class TokenDifferences(msgspec.Struct, frozen=True, array_like=True):
    """How an adapter's tokenizer differs from the base's."""

    added: tuple[AddedToken, ...] = ()  # tokens that the base's tokenizer does not find in texts
    missing_ids: tuple[int, ...] = ()  # added tokens of the base that the adapter's tokenizer lacks
    reason: str | None = None  # if it makes other tokens than the base


def compare(
    words: Mapping[str, int] | None, added: Iterable[AddedToken], base: BaseTokens
) -> TokenDifferences:
    """Compare an adapter's tokenizer with the base's.

    Args:
        words: Its vocabulary without added tokens; None = unknown, assumed to be the base's.
        added: Its known added tokens.
        base: The base's tokens.
    """
    own_added = {token.content: token for token in added if token.content}  # as ``tokenizers`` does
    ids = {**(words or {}), **{one.content: one.token_id for one in own_added.values()}}
    for content, token_id in ids.items():
        if base.ids.get(content) != token_id:
            reason = _conflict(content, token_id, base)
            if reason is None and content not in own_added:
                reason = f"the base has no token {_shown(content)} (id {token_id})"
            if reason is not None:
                return TokenDifferences(reason=reason)
    missing = () if words is None else base.ids.keys() - ids.keys()
    for content in missing:
        if content not in base.added:
            return TokenDifferences(reason=f"the base's token {_shown(content)} is missing")
    more = [one for one in own_added.values() if one.content not in base.added]
    if len(more) > MAX_ADDED_TOKENS:
        return TokenDifferences(reason=f"it adds {len(more)} tokens; at most {MAX_ADDED_TOKENS} are served")
    return TokenDifferences(
        tuple(sorted(more, key=lambda one: one.token_id)),
        tuple(sorted(base.ids[content] for content in missing)),
    )


def _conflict(content: str, token_id: int, base: BaseTokens) -> str | None:
    """Describe the base's conflict with a token; None if it has neither the text nor the id."""
    own_id, other = base.ids.get(content), base.contents.get(token_id)
    if own_id is not None:
        return f"token {_shown(content)} has id {token_id}, but id {own_id} in the base"
    if other is not None:
        return f"id {token_id} is token {_shown(content)}, but token {_shown(other)} in the base"
    return None


def _shown(content: str) -> str:
    is_long = len(content) > _MAX_CHARS_SHOWN
    return repr(content[:_MAX_CHARS_SHOWN] + "…" if is_long else content)
