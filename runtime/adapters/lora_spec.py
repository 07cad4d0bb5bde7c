"""The settings of a PEFT configuration for each module: target or not, rank, alpha, scaling.

Implements PEFT's matching rules. Knows nothing of files or of the model: callers pass module paths,
which must be those of the model that the adapter was trained with.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .path_regex import PathPatterns

ALL_LINEAR = "all-linear"
_PLAIN_NAME = re.compile(r"\w+")
_FIRST_INDEX = r".*?\.[^.]*\.(?P<layer>\d+)\."


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The fields of adapter_config.json that affect the adapter's arithmetic.

    Patterns are pairs in the order of the file, because the first match counts.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str  # names or path suffixes, a regex, or "all-linear"
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()  # modules with full weights in the file
    base_model_name_or_path: str | None = None
    use_dora: bool = False  # each target has a magnitude for each row of its output
    # Tokens with rows in the file, in their order, by name of the module; "" = the embedding.
    trainable_token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ensure_weight_tying: bool = False  # what is trained of a tied embedding is so of the head
    patterns: PathPatterns = field(default_factory=PathPatterns, compare=False, repr=False)

    def targets(self, path: str, *, is_vocabulary: bool = False) -> bool:
        """Whether PEFT puts LoRA on module ``path``; ``is_vocabulary``: the head or an embedding.

        Raises ``TimeoutError`` if the patterns take too long, as ``rank`` and ``scaling`` do.
        """
        if self._is_named(self.exclude_modules, path):
            return False
        if self.targets_all_linear:
            return not is_vocabulary
        if isinstance(self.target_modules, str):
            return self._is_named(self.target_modules, path)
        if path in self.target_modules:  # a full path counts in any layer
            return True
        return self._is_named(self.target_modules, path) and self._takes_layer_of(path)

    def saves(self, path: str) -> bool:
        """Whether the file has module ``path`` as a module of its own, trained in full."""
        return self._is_named(self.modules_to_save, path)

    def trained_tokens(self, path: str, *, is_embedding: bool) -> tuple[int, ...] | None:
        """The tokens of module ``path`` with rows in the file; None = it is not trained so.

        ``is_embedding``: it is the embedding of tokens.
        """
        for name, tokens in self.trainable_token_indices:
            if self._is_named((name,), path) if name else is_embedding:
                return tokens
        return None

    @property
    def targets_all_linear(self) -> bool:
        """Whether all linear modules except the output head are targeted."""
        names = self.target_modules
        return isinstance(names, str) and names.lower() == ALL_LINEAR

    def rank(self, path: str) -> int:
        return int(self._from_pattern(self.rank_pattern, path, self.r))

    def scaling(self, path: str) -> float:
        """The factor of B A for module ``path``: alpha / rank, with rsLoRA alpha / sqrt(rank)."""
        alpha = float(self._from_pattern(self.alpha_pattern, path, self.lora_alpha))
        rank = self.rank(path)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def effective_fields(self) -> dict[str, Any]:
        """Return all fields that affect the result, in an order independent of the file."""
        names = self.target_modules
        excluded = self.exclude_modules
        return {
            "r": self.r,
            "lora_alpha": float(self.lora_alpha),
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "trainable_token_indices": self.trainable_token_indices,
            "ensure_weight_tying": self.ensure_weight_tying,
            "target_modules": names if isinstance(names, str) else sorted(names),
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": [(key, float(alpha)) for key, alpha in self.alpha_pattern],
            "exclude_modules": excluded if isinstance(excluded, str) else sorted(excluded),
            "layers_to_transform": self.layers_to_transform and sorted(self.layers_to_transform),
            "layers_pattern": self.layers_pattern,
        }

    def _takes_layer_of(self, path: str) -> bool:
        if not self.layers_to_transform:
            return True
        layer = self._layer_of(path)
        return layer is not None and layer in self.layers_to_transform

    def _layer_of(self, path: str) -> int | None:
        """The first index in ``path``, or the one that follows a name of ``layers_pattern``."""
        patterns = [layers_pattern_regex(name) for name in self.layers_pattern] or [_FIRST_INDEX]
        for pattern in patterns:
            match = self.patterns.match(pattern, path)
            if match:  # alternatives in a name may match without an index
                return None if match["layer"] is None else int(match["layer"])
        return None

    def _is_named(self, names: tuple[str, ...] | str, path: str) -> bool:
        """Whether a regex matches the whole path, or a name of the list is the path or its end."""
        if isinstance(names, str):
            return self.patterns.fullmatch(names, path) is not None
        return any(path == name or path.endswith(f".{name}") for name in names)

    def _from_pattern(self, pattern: Sequence[tuple[str, float]], path: str, default: float) -> float:
        """Return the value of the first key that matches the end of ``path`` after a dot.

        A key is a regex; one that matches only as plain text counts last, as in PEFT.
        """
        for key, value in pattern:
            if _PLAIN_NAME.fullmatch(key):  # most are, and need no regex
                if path == key or path.endswith(f".{key}"):
                    return value
            elif self.patterns.match(pattern_key_regex(key), path):
                return value
        return dict(pattern).get(path, default)


def layers_pattern_regex(name: str) -> str:
    """Return the regex of a name in layers_pattern; the group "layer" is the index after it."""
    return rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\."


def pattern_key_regex(key: str) -> str:
    """Return the regex of a key in rank_pattern or alpha_pattern."""
    return rf"(.*\.)?({key})$"
