"""Matches the tensors of a PEFT adapter with the targets of the base model.

Checks everything that needs no arithmetic: names, shapes, ranks, types, and that configuration and
file agree. Values are checked when they are converted.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ..errors import AdapterError
from ..near_names import near_names
from .lora_spec import LoraSpec
from .resolved import FLOAT_BYTES, RawTensor, ResolvedAdapter, SavedWeight, TargetLora
from .target_map import EXPERTS_REASON, Target, TargetMap, UnusedModule
from .tensor_names import (
    SAVED_MODULES_REASON,
    PathIndex,
    PrefixChange,
    parse_base_tensor_name,
    parse_tensor_name,
    refusal_of_name,
)
from .token_rows import RowsResolver
from .vocabulary import MAX_ADDED_TOKENS

_MAGNITUDES = "magnitude_vector"  # of a tensor's name
_ROWS = "trainable_tokens_delta"
_MAX_LISTED = 8
_MAX_MODULES_SHOWN = 3
_MAX_KEPT = 32  # cached results, by the adapter's shapes


class ResolveError(AdapterError):
    """The adapter does not fit. ``problems`` has all reasons, the message the first few."""

    def __init__(self, problems: Sequence[str], directory: Path | None = None) -> None:
        self.problems = tuple(problems)
        shown = [f"  {problem}" for problem in self.problems[:_MAX_LISTED]]
        if len(self.problems) > _MAX_LISTED:
            shown.append(f"  and {len(self.problems) - _MAX_LISTED} more")
        where = "" if directory is None else f"{directory}: "
        super().__init__("\n".join([f"{where}the adapter does not fit the model:", *shown]))


@lru_cache(_MAX_KEPT)
def max_tensor_bytes(target_map: TargetMap, max_rank: int) -> int:
    """Return the largest file size of the tensors of an adapter within the limits."""
    features = sum(one.in_features + one.out_features for one in target_map.targets)
    features += sum(one.num_features for one in target_map.unused)
    weights = sum(one.num_weights for one in target_map.unused)
    weights += sum(
        math.prod(shape) for one in target_map.vocabularies.values() for shape in one.shapes.values()
    )
    # PEFT may save a weight of another size three times.
    weights += sum(
        (2 * one.num_tokens + 3 * MAX_ADDED_TOKENS) * one.row_features
        for one in target_map.targets
        if one.is_vocabulary
    )
    # One more than the rank: DoRA has magnitudes.
    return max(FLOAT_BYTES.values()) * ((max_rank + 1) * features + weights)


def resolve_adapter(
    spec: LoraSpec, tensors: Sequence[RawTensor], target_map: TargetMap, *, max_rank: int
) -> ResolvedAdapter:
    """Match ``tensors`` with targets, and check names, shapes, ranks and types.

    Results are cached for adapters with the same shapes. Raises ``ResolveError`` with every
    problem, or with a pattern that takes too long.
    """
    nameless = replace(spec, base_model_name_or_path=None)  # which changes no result
    return _resolve(nameless, tuple(tensors), target_map, max_rank)


@lru_cache(_MAX_KEPT)
def _resolve(
    spec: LoraSpec, tensors: tuple[RawTensor, ...], target_map: TargetMap, max_rank: int
) -> ResolvedAdapter:
    resolver = _Resolver(spec, target_map, max_rank)
    try:
        for tensor in tensors:
            resolver.add(tensor)
        return resolver.finish()
    except TimeoutError as error:
        raise ResolveError([str(error)]) from None


def _phrases(left_out: Iterable[UnusedModule]) -> tuple[str, ...]:
    """Describe the left-out modules (one for each tensor), in one phrase for each reason."""
    modules: dict[str, Counter[str]] = {}
    for one in left_out:
        modules.setdefault(one.reason, Counter())[one.path] += 1
    phrases = []
    for reason, paths in modules.items():
        num, shown = paths.total(), ", ".join([*paths][:_MAX_MODULES_SHOWN])
        more = len(paths) - _MAX_MODULES_SHOWN
        tensors = "1 tensor" if num == 1 else f"{num} tensors"
        phrases.append(f"{tensors} of {shown}{f' and {more} more modules' if more > 0 else ''} ({reason})")
    return tuple(phrases)


@dataclass(frozen=True, slots=True)
class _Found:
    """The tensors of one target."""

    target: Target
    path: str  # in the model that the adapter was trained with
    matrices: dict[str, RawTensor]  # by "A", "B" and "magnitude_vector"


class _Resolver:
    """Collects the tensors of every target, and the problems."""

    def __init__(self, spec: LoraSpec, target_map: TargetMap, max_rank: int) -> None:
        self._spec = spec
        self._map = target_map
        self._max_rank = max_rank
        self._targets = PathIndex({target.path: target for target in target_map.targets})
        self._refused = PathIndex(target_map.refused)
        self._unused = PathIndex({one.path: one for one in target_map.unused})
        self._vocabularies = PathIndex(target_map.vocabularies)
        self._found: dict[int, _Found] = {}
        self._saved: list[SavedWeight] = []  # that must equal the base's
        self._left_out: list[UnusedModule] = []  # one for each tensor
        self._saved_paths: list[str] = []  # modules with full weights in the file
        self._problems: list[str] = []
        self._rows = RowsResolver(spec, target_map, self._problems)

    def add(self, tensor: RawTensor) -> None:
        name = parse_tensor_name(tensor.name)
        if name is None:
            self._add_saved(tensor)
            return
        target = self._targets.find(name.path)
        if target is None:
            if not self._leaves_out(name.path):
                self._problems.append(f"{tensor.name}: {self._reason_unmatched(name.path)}")
            return
        if name.matrix == _ROWS:
            self._rows.add_trained(target, tensor, name.path)
            return
        found = self._found.setdefault(target.index, _Found(target, name.path, {}))
        first = found.matrices.setdefault(name.matrix, tensor)
        if first is not tensor:
            self._problems.append(f"{tensor.name}: the module already has {first.name}")

    def finish(self) -> ResolvedAdapter:
        checked = [self._check(self._found[index]) for index in sorted(self._found)]
        self._check_announced()
        if not self._found:
            of_text = " that processes text" if self._left_out else ""
            self._problems.append(f"the file changes no module of this model{of_text}")
        loras = tuple(lora for lora in checked if lora is not None)
        is_scaled = {lora.target.index: lora.magnitudes is not None for lora in loras}
        rows = self._rows.finish(is_scaled)
        if self._problems:
            raise ResolveError(self._problems)
        saved = (*self._saved, *self._rows.weights)
        return ResolvedAdapter(loras, saved, rows, _phrases(self._left_out))

    def _add_saved(self, tensor: RawTensor) -> None:
        """Add a tensor that is not a LoRA matrix: of an unused module, or one of the base's."""
        name = parse_base_tensor_name(tensor.name)
        if name is not None:
            self._saved_paths.append(name.path)
            if self._leaves_out(name.path):
                return
        vocabulary = None if name is None else self._vocabularies.find(name.path)
        shape = None if name is None or vocabulary is None else vocabulary.shapes.get(name.name)
        target = None if name is None else self._targets.find(name.path)
        is_served = target is not None and target.is_vocabulary and len(tensor.shape) == 2
        if name is None or vocabulary is None or shape is None:
            self._problems.append(f"{tensor.name}: {refusal_of_name(tensor.name)}")
        elif (
            is_served
            and tensor.shape[1:] == shape[1:]
            and tensor.shape[0] > 0
            and tensor.dtype in FLOAT_BYTES
        ):
            weight = SavedWeight(tensor, vocabulary.tensor_name(name.name), target)
            self._rows.add_weight(weight, name.form)
        elif tensor.shape != shape or tensor.dtype not in FLOAT_BYTES:
            self._problems.append(
                f"{tensor.name}: {tensor.dtype} of shape {list(tensor.shape)} is not a copy of the "
                f"base model's, which has the shape {list(shape)}; {SAVED_MODULES_REASON}"
            )
        else:
            self._saved.append(SavedWeight(tensor, vocabulary.tensor_name(name.name), None))

    def _leaves_out(self, path: str) -> bool:
        """Record a tensor of a module without effect on text; False if it has an effect."""
        unused = self._unused.find_holder(path)
        if unused is not None:
            self._left_out.append(unused)
        return unused is not None

    def _check(self, found: _Found) -> TargetLora | None:
        num_problems_before = len(self._problems)
        target, path = found.target, found.path
        if not self._spec.targets(path, is_vocabulary=target.is_vocabulary):
            self._problems.append(
                f"{path}: the file has tensors for it, but target_modules, exclude_modules or "
                "layers_to_transform of the configuration exclude it"
            )
        rank = self._spec.rank(path)
        if rank > self._max_rank:
            self._problems.append(
                f"{path}: rank {rank} is over the limit of {self._max_rank} (--max-lora-rank)"
            )
        self._check_matrix(found, "A", (rank, target.in_features))
        self._check_matrix(found, "B", (target.out_features, rank))
        magnitudes = found.matrices.get(_MAGNITUDES)
        if self._spec.use_dora and target.is_embedding:
            self._problems.append(f"{path}: DoRA on embeddings is not served")
        elif self._spec.use_dora:
            self._check_matrix(found, _MAGNITUDES, (target.out_features,))
        elif magnitudes is not None:
            self._problems.append(f"{magnitudes.name}: use_dora of the configuration is not true")
        if len(self._problems) > num_problems_before:
            return None
        matrices = found.matrices
        return TargetLora(target, matrices["A"], matrices["B"], rank, self._spec.scaling(path), magnitudes)

    def _check_matrix(self, found: _Found, matrix: str, shape: tuple[int, ...]) -> None:
        tensor = found.matrices.get(matrix)
        if tensor is None:
            reason = "; use_dora needs it" if matrix == _MAGNITUDES else ""
            self._problems.append(f"{found.path}: lora_{matrix} is missing in the file{reason}")
            return
        if tensor.dtype not in FLOAT_BYTES:
            served = ", ".join(FLOAT_BYTES)
            self._problems.append(f"{tensor.name}: type {tensor.dtype} is not served, only {served}")
        if tensor.shape != shape:
            self._problems.append(
                f"{tensor.name}: shape {list(tensor.shape)}, but the model and the configuration's "
                f"rank {self._spec.rank(found.path)} need {list(shape)}"
            )

    def _reason_unmatched(self, path: str) -> str:
        """Return why no target has this path: refused, or unknown (with near names)."""
        reason = self._refused.find_holder(path)
        if reason is not None:
            return reason
        if "experts" in path.split("."):
            return EXPERTS_REASON
        if len(self._problems) >= _MAX_LISTED:  # a comparison with all names is slow
            return f"the model has no linear module {path}"
        names = [target.path for target in self._map.targets]
        hint = near_names(path, names, "; near names: {}", joint=", ", show=str, most=2, cutoff=0.8)
        return f"the model has no linear module {path}{hint}"

    def _check_announced(self) -> None:
        """Check that every module that the configuration targets is in the file and served."""
        trained = self._trained_paths()
        for target in self._map.targets:
            # Without tensors, PEFT makes a LoRA of these that has no effect.
            path = trained(target.path)
            is_expected = not target.is_vocabulary and target.index not in self._found
            if is_expected and self._spec.targets(path):
                self._problems.append(
                    f"{path}: the configuration targets it, but the file has no tensors for it"
                )
        for name in self._spec.modules_to_save:
            if not any(f".{name}." in f".{path}." for path in self._saved_paths):
                self._problems.append(
                    f"{name}: modules_to_save names it, but the file does not have its weights; "
                    f"{SAVED_MODULES_REASON}"
                )
        if self._spec.targets_all_linear:
            return  # excludes modules that are not linear
        for refused, reason in self._map.refused.items():
            # LoRA on other embeddings is refused if the file has it. Without, PEFT makes one that
            # has no effect.
            if refused not in self._map.vocabularies and self._spec.targets(trained(refused)):
                self._problems.append(f"{refused}: the configuration targets it: {reason}")

    def _trained_paths(self) -> PrefixChange:
        """Return the change from this model's paths to those of the adapter's training."""
        for found in self._found.values():
            return PrefixChange.between(found.target.path, found.path)
        return PrefixChange("", "")
