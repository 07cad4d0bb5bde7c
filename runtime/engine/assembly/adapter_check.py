"""``corun check``: whether an adapter fits a model, and its size. Reads no base weights."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....gpu.model import source as source_module
from ....gpu.model.source import ModelSource, check_directory, is_gguf_model, warn_of_adapter
from ...adapters.base_names import ServedBase
from ...adapters.load import open_adapter
from ...adapters.lora_spec import LoraSpec
from ...adapters.resolve import ResolveError
from ...adapters.resolved import BaseWeights, RawTensor, ResolvedAdapter, StoredTensor
from ...adapters.target_map import TargetMap
from ...adapters.values import check_values
from ...errors import AdapterError
from ...kept_records import read_record, write_record

_DEVICE_DTYPES = (("float32", 4), ("bfloat16 or float16", 2))


_PACKAGES = ("torch", "transformers")


# They come from ``gpu/model/skeleton.py``, as for a start, and are stored with digests of
# everything they depend on: the configuration, the files of the model's classes, and versions.
@dataclass(frozen=True, slots=True)
class KnownBase:
    """Facts about a base model that need no weights."""

    target_map: TargetMap
    dtype: str  # for serving
    served: ServedBase
    code: dict[str, str]  # SHA-256 of the files that the facts come from, by path


def known_base(source: ModelSource, dtype: str, directory: Path | None) -> KnownBase:
    """Read the stored facts of a model, or build its modules and store their facts.

    ``dtype``: as for ``--dtype``. ``directory``: of the stored facts; None = not stored. Facts are
    stored only for models in local directories without code of their own: others can change
    elsewhere. Raises ``ModelError``.
    """
    check_directory(source)
    path = None
    if directory is not None and Path(source.path).is_dir() and not source.trust_remote_code:
        path = directory / f"{_digest(source, dtype)}.base.json"
        known = read_record(path, KnownBase)
        if known is not None and _digests(map(Path, known.code)) == known.code:
            warn_of_adapter(source)
            return known
    known = _find(source, dtype)
    if path is not None:
        write_record(path, known, "the next check builds the model's modules again")
    return known


def _find(source: ModelSource, dtype: str) -> KnownBase:
    from ....gpu.model.load import resolve_dtype
    from ....gpu.model.skeleton import target_map_and_code_of
    from ....gpu.model.source import load_config
    from .base_model import read_served_base

    target_map, code = target_map_and_code_of(source)
    served_dtype = str(resolve_dtype(dtype, load_config(source))).removeprefix("torch.")
    own = sorted(Path(source_module.__file__).parent.glob("*.py"))  # the source of the facts
    return KnownBase(target_map, served_dtype, read_served_base(source), _digests((*code, *own)))


def _digest(source: ModelSource, dtype: str) -> str:
    """Return the digest that names a record: the model's path and configuration, and versions."""
    directory = Path(source.path)
    versions = [metadata.version(package) for package in _PACKAGES]
    files = _digests(sorted(directory.glob("config*.json")))
    question = (source.path, str(directory.resolve()), dtype, versions, files)
    return hashlib.sha256(repr(question).encode()).hexdigest()


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each readable file."""
    found = {}
    for file in files:
        try:
            found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result. ``problems`` is empty exactly if the adapter can be served."""

    directory: str
    model: str
    problems: tuple[str, ...]
    spec: LoraSpec | None = None
    adapter: ResolvedAdapter | None = None
    digest: str | None = None
    remark: str | None = None  # on the base that the adapter names

    @property
    def ok(self) -> bool:
        """Whether the adapter can be served over the model."""
        return not self.problems

    def lines(self) -> tuple[str, ...]:
        if not self.ok:
            count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
            head = f"{self.directory} cannot be served over {self.model}: {count}"
            return (head, *(f"  - {problem}" for problem in self.problems))
        assert self.spec is not None and self.adapter is not None
        head = f"{self.directory} can be served over {self.model}"
        return (head, *(f"  {line}" for line in _describe(self.spec, self.adapter)), *self._tail())

    def _tail(self) -> tuple[str, ...]:
        digest = f"  digest    {self.digest}"
        return (digest,) if self.remark is None else (digest, f"  note      {self.remark}")


class _BaseWeights:
    """The weights in the model's files; see ``resolved.BaseWeights``.

    Loaded only for adapters with copies of base weights, as reading weights needs torch.
    """

    def __init__(self, source: ModelSource, dtype: str) -> None:
        """``dtype``: the type that the model is served in."""
        self._source = source
        self._dtype = dtype

    def differing_rows(self, name: str, tensor: RawTensor, parts: Iterable[memoryview]) -> NDArray[np.bool_]:
        return self._stored.differing_rows(name, tensor, parts)

    @cached_property
    def _stored(self) -> BaseWeights:
        import torch

        from ....gpu.model.base_weights import StoredBaseWeights

        return StoredBaseWeights(self._source, getattr(torch, self._dtype))


def run_check(
    adapter: Path,
    model: str,
    *,
    dtype: str = "auto",
    max_rank: int = 256,
    revision: str | None = None,
    trust_remote_code: bool = False,
    kept_bases: Path | None = None,
) -> CheckReport:
    """Check the PEFT directory ``adapter`` against the model directory or hub id ``model``.

    Builds the model's modules from its configuration, without weights, unless ``kept_bases`` (a
    directory; None = none) has their facts. Of the weights only those are read that the adapter
    has a copy of. ``dtype``: the type to serve the model in.
    Raises ``ModelError`` if that fails, or ``adapter`` is a GGUF model; problems of the adapter are
    in the report. A module that the model never calls is found only by the engine, which runs the
    model.
    """
    if is_gguf_model(adapter):
        check_directory(ModelSource(str(adapter)))
    source = ModelSource(model, revision, trust_remote_code)
    known = known_base(source, dtype, kept_bases)
    base = _BaseWeights(source, known.dtype)

    def check(tensors: Sequence[StoredTensor]) -> None:
        for raw, data in tensors:
            check_values(raw, data, known.dtype)

    try:
        with open_adapter(adapter, known.target_map, max_rank=max_rank, base=base) as reader:
            for _ in reader.read_layers(check):
                pass
            digest = reader.digest.hexadecimal
            remark = known.served.remark(reader.spec.base_model_name_or_path)
            return CheckReport(str(adapter), model, (), reader.spec, reader.adapter, digest, remark)
    except ResolveError as error:
        return CheckReport(str(adapter), model, error.problems)
    except AdapterError as error:
        return CheckReport(str(adapter), model, (str(error),))


def _describe(spec: LoraSpec, adapter: ResolvedAdapter) -> list[str]:
    loras = adapter.targets
    layers = sorted({lora.target.layer for lora in loras if lora.target.is_inside})
    kinds = Counter(lora.target.path.rpartition(".")[2] for lora in loras)
    targets = ", ".join(f"{kind} x{count}" for kind, count in kinds.items())
    scalings = ", ".join(f"{scaling:g}" for scaling in sorted({lora.scaling for lora in loras}))
    rule = "alpha / sqrt(rank), rsLoRA" if spec.use_rslora else "alpha / rank"
    rule += ", DoRA" if spec.use_dora else ""
    ranks = ", ".join(str(rank) for rank in sorted({lora.rank for lora in loras}))
    return [
        f"rank      {ranks}",
        f"scaling   {scalings} ({rule})",
        f"targets   {len(loras)}: {targets}",
        f"layers    {len(layers)}{': ' if layers else ''}{_ranges(layers)}",
        *(f"bytes     {adapter.num_bytes(size):,} on the device in {name}" for name, size in _DEVICE_DTYPES),
        f"base      {spec.base_model_name_or_path or 'not named'}",
        *(f"left out  {phrase}" for phrase in adapter.left_out),
        *_describe_rows(adapter),
    ]


def _describe_rows(adapter: ResolvedAdapter) -> list[str]:
    """Of each module with rows of its own, their number; and what equals the base's weights."""
    lines = []
    changed = [one for one in adapter.rows if one.changes_base]
    for one in changed:
        size = one.target.num_tokens
        vocabulary = "" if one.num_tokens == size else f"; {one.num_tokens} tokens, the base {size}"
        lines.append(f"rows      {one.num_rows} of {one.target.path}{vocabulary}")
    return lines + [
        f"as base   {weight.tensor.name}"
        for weight in adapter.saved
        if all(weight.target is not one.target for one in changed)
    ]


def _ranges(numbers: list[int]) -> str:
    """Write ascending numbers as "0-3, 7"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
