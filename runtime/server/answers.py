"""The bodies of answers that generate nothing, as structs that encode to JSON."""

from collections.abc import Sequence
from typing import Literal

import msgspec


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the engine is alive."""

    status: Literal["ok", "dead"]
    reason: str | None = None


class Readiness(msgspec.Struct, frozen=True):
    """New requests are accepted."""

    status: Literal["ready"] = "ready"


class Version(msgspec.Struct, frozen=True):
    """The version of corun."""

    version: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``/v1/models``: the base model, or an adapter, with it as parent."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "corun"
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """The names that requests can give as model."""

    data: Sequence[ModelCard]
    object: str = "list"


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of a text or of a conversation."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizedText(msgspec.Struct, frozen=True):
    """The text of tokens, including special tokens."""

    prompt: str
