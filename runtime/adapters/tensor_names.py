"""The names that PEFT gives to tensors and modules, and their match with the model's paths.

The model that an adapter was trained with may have been wrapped (compiled, sharded, inside a
multi-modal model), so its paths may begin differently from those of the served model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from .target_map import EXPERTS_REASON

_Item = TypeVar("_Item")

_LORA_TENSOR = re.compile(r"(?P<path>.+)\.lora_(?P<matrix>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_EMBEDDING_TENSOR = re.compile(r"(?P<path>.+)\.lora_embedding_(?P<matrix>[AB])(?:\.(?P<adapter>[^.]+))?")
_MAGNITUDES = re.compile(
    r"(?P<path>.+)\.lora_(?P<matrix>magnitude_vector)(?:\.(?P<adapter>[^.]+))?(?:\.weight)?"
)
_TOKEN_ROWS = re.compile(
    r"(?P<path>.+)\.token_adapter\.(?P<matrix>trainable_tokens_delta)(?:\.(?P<adapter>[^.]+))?"
)
_TENSORS = (_LORA_TENSOR, _EMBEDDING_TENSOR, _MAGNITUDES, _TOKEN_ROWS)
# PEFT's model, possibly inside data parallelism, possibly inside another PEFT model.
_PEFT_PREFIX = re.compile(r"(?:(?:module\.)*base_model\.model\.)+")

# A weight of the base that PEFT saved beside LoRA, with PEFT's wrappers.
_BASE_TENSOR = re.compile(
    r"(?P<path>.+?)"
    r"(?:\.(?:(?:token_adapter\.)?base_layer|(?P<form>original_module|modules_to_save)(?:\.[^.]+)?))?"
    r"\.(?P<name>[^.]+)"
)

# Components that wrappers insert anywhere in a path.
_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module"}
)

# Leading components before the decoder; which of them occur depends on the outer class.
_HOLDERS = frozenset(
    {"module", "model", "language_model", "text_model", "llm", "thinker", "transformer", "gpt_neox"}
)

SAVED_MODULES_REASON = "of fully trained modules only the embedding of tokens and the output head are served"

# Parts of tensor names that are known but not served.
_REFUSED_PARTS = (("modules_to_save", SAVED_MODULES_REASON), (".experts.", EXPERTS_REASON))


@dataclass(frozen=True, slots=True)
class LoraTensorName:
    """The parts of the name of a LoRA matrix, of DoRA's magnitudes, or of rows of tokens."""

    path: str  # of the module, in the model that the adapter was trained with
    matrix: str  # "A", "B", "magnitude_vector" or "trainable_tokens_delta"


def parse_tensor_name(name: str) -> LoraTensorName | None:
    """Parse ``base_model.model.<path>.lora_A.weight``, B, magnitudes or rows; None for others.

    An adapter's name after lora_A, and a missing prefix, are tolerated.
    """
    match = next(filter(None, (one.fullmatch(name) for one in _TENSORS)), None)
    if match is None:
        return None
    return LoraTensorName(_without_wrappers(match["path"]), match["matrix"])


@dataclass(frozen=True, slots=True)
class BaseTensorName:
    """The parts of the name of a tensor that is not a LoRA matrix."""

    path: str  # of the module, in the model that the adapter was trained with
    name: str  # e.g. "weight"
    form: str = ""  # PEFT's "original_module" or "modules_to_save"


def parse_base_tensor_name(name: str) -> BaseTensorName | None:
    """Parse ``base_model.model.<path>.weight``, as PEFT saves weights of the base.

    PEFT's wrappers of such modules are tolerated. None if there is no path.
    """
    match = _BASE_TENSOR.fullmatch(_without_wrappers(name))
    return None if match is None else BaseTensorName(match["path"], match["name"], match["form"] or "")


def refusal_of_name(name: str) -> str:
    """Return the reason to refuse a tensor that is not a LoRA matrix."""
    for part, reason in _REFUSED_PARTS:
        if part in name:
            return reason
    return "not a LoRA matrix (<module>.lora_A.weight or <module>.lora_B.weight)"


class PathIndex(Generic[_Item]):
    """Finds the item of a module path, even if the path begins with other wrappers."""

    def __init__(self, items: Mapping[str, _Item]) -> None:
        self._exact = dict(items)
        self._by_tail: dict[str, _Item] = {}
        ambiguous = set()
        for path, item in items.items():
            tail = _without_holders(path)
            if tail in self._by_tail:
                ambiguous.add(tail)
            self._by_tail[tail] = item
        for tail in ambiguous:
            del self._by_tail[tail]

    def find(self, path: str) -> _Item | None:
        if path in self._exact:
            return self._exact[path]
        return self._by_tail.get(_without_holders(path))

    def find_holder(self, path: str) -> _Item | None:
        """Return the item of ``path`` or of the nearest module that contains it, or None."""
        while path:
            item = self.find(path)
            if item is not None:
                return item
            path = path.rpartition(".")[0]
        return None


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """Replaces the beginning of paths."""

    old: str
    new: str

    @classmethod
    def between(cls, path: str, other: str) -> "PrefixChange":
        """Return the change that keeps the longest common end of two paths."""
        ours, theirs = path.split("."), other.split(".")
        while ours and theirs and ours[-1] == theirs[-1]:
            ours.pop()
            theirs.pop()
        return cls("".join(f"{name}." for name in ours), "".join(f"{name}." for name in theirs))

    def __call__(self, path: str) -> str:
        return self.new + path[len(self.old) :] if path.startswith(self.old) else path


def _without_wrappers(path: str) -> str:
    """Return ``path`` without the wrappers of PEFT and other libraries, in any nesting."""
    path = ".".join(name for name in path.split(".") if name not in _WRAPPERS)
    return _PEFT_PREFIX.sub("", path, count=1) if _PEFT_PREFIX.match(path) else path


def _without_holders(path: str) -> str:
    names = path.split(".")
    while len(names) > 1 and names[0] in _HOLDERS:
        names.pop(0)
    return ".".join(names)
