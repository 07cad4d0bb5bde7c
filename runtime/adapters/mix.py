"""Mixes: weighted sums of adapters, as requests name them.

A mix is an adapter of its own, with a name, a content, KV and a place in memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from ..errors import RequestError
from .conventions import NO_CONVENTIONS, AdapterConventions

MAX_PARTS = 4
MAX_SCALE = 100.0
_BETWEEN = ":"  # names of adapters have none


@dataclass(frozen=True, slots=True, init=False)
class LoRAMix:
    """Several adapters for one request: the sum of their deltas, each times its scale.

    The order of the parts does not matter.
    """

    parts: tuple[tuple[str, float], ...]  # names and scales, by name

    def __init__(self, parts: Iterable[tuple[str, float]]) -> None:
        """``parts``: names of registered adapters, each with its scale.

        Raises ``RequestError`` unless they are 1 to 4 different names with scales that are not 0
        and at most 100 in absolute value.
        """
        pairs = sorted((name, float(scale)) for name, scale in parts)
        if not 1 <= len(pairs) <= MAX_PARTS:
            raise _invalid(f"lora has {len(pairs)} adapters, must have 1 to {MAX_PARTS}")
        for (name, _), (other, _) in pairwise(pairs):
            if name == other:
                raise _invalid(f"lora names the adapter {name!r} twice")
        for name, scale in pairs:
            if not name or _BETWEEN in name:
                raise _invalid(f"lora has the name {name!r}, which no adapter can have")
            if scale == 0 or not abs(scale) <= MAX_SCALE:
                raise _invalid(
                    f"lora has the scale {scale:g} for {name!r}, must be in [-{MAX_SCALE:g}, "
                    f"{MAX_SCALE:g}] and not 0"
                )
        object.__setattr__(self, "parts", tuple(pairs))

    @property
    def lora_name(self) -> str:
        """Its name as an adapter; that of its part if it is this alone."""
        if len(self.parts) == 1 and self.parts[0][1] == 1:
            return self.parts[0][0]
        return _BETWEEN.join(f"{name}{_BETWEEN}{scale!r}" for name, scale in self.parts)

    @classmethod
    def named(cls, lora_name: str) -> Self | None:
        """Return the mix with this name; None = it names an adapter."""
        if _BETWEEN not in lora_name:
            return None
        words = lora_name.split(_BETWEEN)
        return cls(zip(words[::2], map(float, words[1::2]), strict=True))


def conventions_of_mix(parts: Iterable[tuple[str, AdapterConventions]]) -> AdapterConventions:
    """Return the conventions of a mix: those of all of its parts that have any.

    ``parts``: their names and conventions. Raises ``RequestError`` if two of them differ.
    """
    own = [(name, one) for name, one in parts if one != NO_CONVENTIONS]
    for (name, one), (other, another) in pairwise(own):
        if one != another:
            raise _invalid(
                f"lora names {name!r} and {other!r}, which have different chat templates, "
                "tokenizers or end tokens: one prompt cannot follow both"
            )
    return own[0][1] if own else NO_CONVENTIONS


def _invalid(message: str) -> RequestError:
    return RequestError(message, param="lora")
