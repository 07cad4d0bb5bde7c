"""Matches the tensors of a PEFT adapter with the targets of the base model.

Owns every check that needs no arithmetic: names, shapes, ranks, types, and that configuration and
file say the same. Values are checked when they are converted, where the arithmetic is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import AdapterError
from ..near_names import near_names
from .lora_spec import ALL_LINEAR, LoraSpec
from .resolved import FLOAT_BYTES, RawTensor, ResolvedAdapter, TargetLora
from .target_map import EXPERTS_REASON, Target, TargetMap
from .tensor_names import PathIndex, PrefixChange, parse_tensor_name, refusal_of_name

_MAX_LISTED = 8
_MAX_KEPT = 32  # adapters' shapes that were resolved


class ResolveError(AdapterError):
    """The adapter does not fit; ``problems`` lists why, the message shows the first few."""

    def __init__(self, problems: Sequence[str], directory: Path | None = None) -> None:
        self.problems = tuple(problems)
        shown = [f"  {problem}" for problem in self.problems[:_MAX_LISTED]]
        if len(self.problems) > _MAX_LISTED:
            shown.append(f"  and {len(self.problems) - _MAX_LISTED} more")
        where = "" if directory is None else f"{directory}: "
        super().__init__("\n".join([f"{where}the adapter does not fit the model:", *shown]))


def max_tensor_bytes(target_map: TargetMap, max_rank: int) -> int:
    """The most that the tensors of an adapter within the limits can take in a file."""
    return max(FLOAT_BYTES.values()) * sum(
        max_rank * (target.in_features + target.out_features) for target in target_map.targets
    )


def resolve_adapter(
    spec: LoraSpec, tensors: Sequence[RawTensor], target_map: TargetMap, *, max_rank: int
) -> ResolvedAdapter:
    """Match ``tensors`` with targets and check names, shapes, ranks and types.

    What adapters of one recipe have in common is found out once. Raises ``ResolveError`` with every
    problem found, or with a pattern that takes too long.
    """
    return _resolve(spec, tuple(tensors), target_map, max_rank)


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


@dataclass(frozen=True, slots=True)
class _Found:
    """The tensors of one target."""

    target: Target
    path: str  # in the model that the adapter was trained with
    matrices: dict[str, RawTensor]  # by "A" and "B"


class _Resolver:
    """Collects the tensors of every target, and the problems."""

    def __init__(self, spec: LoraSpec, target_map: TargetMap, max_rank: int) -> None:
        self._spec = spec
        self._map = target_map
        self._max_rank = max_rank
        self._targets = PathIndex({target.path: target for target in target_map.targets})
        self._refused = PathIndex(target_map.refused)
        self._found: dict[int, _Found] = {}
        self._problems: list[str] = []

    def add(self, tensor: RawTensor) -> None:
        name = parse_tensor_name(tensor.name)
        if name is None:
            self._problems.append(f"{tensor.name}: {refusal_of_name(tensor.name)}")
            return
        target = self._targets.find(name.path)
        if target is None:
            self._problems.append(f"{tensor.name}: {self._reason_unmatched(name.path)}")
            return
        found = self._found.setdefault(target.index, _Found(target, name.path, {}))
        first = found.matrices.setdefault(name.matrix, tensor)
        if first is not tensor:
            self._problems.append(f"{tensor.name}: the module has {first.name} already")

    def finish(self) -> ResolvedAdapter:
        checked = [self._check(self._found[index]) for index in sorted(self._found)]
        self._check_announced()
        if not self._found:
            self._problems.append("the file changes no module of this model")
        if self._problems:
            raise ResolveError(self._problems)
        return ResolvedAdapter(tuple(lora for lora in checked if lora is not None))

    def _check(self, found: _Found) -> TargetLora | None:
        num_problems_before = len(self._problems)
        target, path = found.target, found.path
        if not self._spec.targets(path):
            self._problems.append(
                f"{path}: the file has tensors for it, but target_modules, exclude_modules or "
                "layers_to_transform of the configuration leave it out"
            )
        rank = self._spec.rank(path)
        if rank > self._max_rank:
            self._problems.append(
                f"{path}: rank {rank} is over the limit of {self._max_rank} (--max-lora-rank)"
            )
        self._check_matrix(found, "A", (rank, target.in_features))
        self._check_matrix(found, "B", (target.out_features, rank))
        if len(self._problems) > num_problems_before:
            return None
        matrices = found.matrices
        return TargetLora(target, matrices["A"], matrices["B"], rank, self._spec.scaling(path))

    def _check_matrix(self, found: _Found, matrix: str, shape: tuple[int, int]) -> None:
        tensor = found.matrices.get(matrix)
        if tensor is None:
            self._problems.append(f"{found.path}: lora_{matrix} is missing in the file")
            return
        if tensor.dtype not in FLOAT_BYTES:
            served = ", ".join(FLOAT_BYTES)
            self._problems.append(
                f"{tensor.name}: type {tensor.dtype} is not served, only {served}"
            )
        if tensor.shape != shape:
            self._problems.append(
                f"{tensor.name}: shape {list(tensor.shape)}, but the model and the configuration's "
                f"rank {self._spec.rank(found.path)} need {list(shape)}"
            )

    def _reason_unmatched(self, path: str) -> str:
        """Why no target has this path: refused by name, or unknown with near names."""
        reason = self._refused.find_holder(path)
        if reason is not None:
            return reason
        if "experts" in path.split("."):
            return EXPERTS_REASON
        names = [target.path for target in self._map.targets]
        hint = near_names(path, names, "; near names: {}", joint=", ", show=str, most=2, cutoff=0.8)
        return f"the model has no linear module {path}{hint}"

    def _check_announced(self) -> None:
        """Every module that the configuration targets must be in the file, and be served."""
        trained = self._trained_paths()
        for target in self._map.targets:
            path = trained(target.path)
            if target.index not in self._found and self._spec.targets(path):
                self._problems.append(
                    f"{path}: the configuration targets it, but the file has no tensors for it"
                )
        modules = self._spec.target_modules
        if isinstance(modules, str) and modules.lower() == ALL_LINEAR:
            return  # leaves out the output head, and takes no module that is not linear
        for refused, reason in self._map.refused.items():
            if self._spec.targets(trained(refused)):
                self._problems.append(f"{refused}: the configuration targets it: {reason}")

    def _trained_paths(self) -> PrefixChange:
        """How this model's paths are written in the model that the adapter was trained with."""
        for found in self._found.values():
            return PrefixChange.between(found.target.path, found.path)
        return PrefixChange("", "")
