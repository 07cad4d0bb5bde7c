"""Opens the parts of a mix, and reads them as one adapter.

Its matrices are those of its parts beside each other, as PEFT's ``add_weighted_adapter`` makes them
with ``combination_type="cat"``: the sum of the parts' deltas, each times its scale.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Self

import numpy as np

from ..errors import AdapterError
from .base_names import full_name_in
from .digest import ContentDigest, digest_head
from .load import OpenAdapter
from .resolved import FileHeader, MixSource, RawTensor, ResolvedAdapter, StoredTensor, TakeTensors, TargetLora
from .values import float32_of

_FLOAT32_BYTES = 4


class OpenMix:
    """The open parts of a mix; see ``resolved.AdapterReader``."""

    def __init__(self, source: MixSource, parts: Sequence[OpenAdapter], max_rank: int) -> None:
        """Takes ownership of ``parts``. Raises ``AdapterError`` if they do not add up."""
        self._source = source
        self._parts = parts
        self._names = [part.name for part in source.parts]
        self._check_parts()
        self._loras = _by_target(parts)
        self.adapter = self.outline = self._resolve(max_rank)

    @property
    def digest(self) -> ContentDigest:
        """The digest of scales and parts, once all have been read."""
        scales = {"scales": [part.scale for part in self._source.parts]}
        return ContentDigest(digest_head(scales, ()), (), tuple(one.digest for one in self._parts))

    def expect(self, digest: ContentDigest) -> None:
        """See ``AdapterReader``."""
        for part, expected in zip(self._parts, digest.parts, strict=True):
            part.expect(expected)

    def begin(self) -> None:
        """See ``AdapterReader``: a mix is read at once, to compare its parts with their versions."""

    def resume(self, header: FileHeader) -> None:
        """See ``AdapterReader``."""
        raise AssertionError("a mix is read at once")

    def read_layers(self, take: TakeTensors) -> Iterator[int]:
        """See ``AdapterReader``; one layer of all parts is in memory at a time."""
        read: dict[tuple[int, str], np.ndarray] = {}

        def keep(index: int, tensors: Sequence[StoredTensor]) -> None:
            read.update({(index, raw.name): float32_of(raw, data) for raw, data in tensors})

        layers = [part.read_layers(partial(keep, index)) for index, part in enumerate(self._parts)]
        of_parts = [{one.target.layer for one in part.adapter.targets} for part in self._parts]
        for layer in sorted(set().union(*of_parts)):
            for found, rest in zip(of_parts, layers, strict=True):
                if layer in found:
                    assert next(rest) == layer
            for mixed in self.adapter.targets:
                if mixed.target.layer == layer:
                    self._take(mixed, read, take)
            read.clear()
            yield layer
        for part, rest, source in zip(self._parts, layers, self._source.parts, strict=True):
            assert next(rest, None) is None, "all layers have been read"
            if part.digest.hexadecimal != source.digest:
                raise AdapterError(
                    f"the files in {source.path} have changed since adapter {source.name!r} was "
                    "registered; register it again to serve the new content"
                )

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_parts(self) -> None:
        bases: dict[str, str] = {}
        for name, part in zip(self._names, self._parts, strict=True):
            if part.spec.use_dora:
                raise AdapterError(f"{name!r} is a DoRA adapter, which does not add to others")
            if any(rows.changes_base for rows in part.adapter.rows):
                raise AdapterError(f"{name!r} has rows of tokens of its own, which do not add to others")
            base = full_name_in(part.spec.base_model_name_or_path)
            if base is not None:
                bases.setdefault(base, f"{name!r} for {part.spec.base_model_name_or_path}")
        if len(bases) > 1:
            raise AdapterError(f"its parts were made for two bases: {', '.join(bases.values())}")

    def _resolve(self, max_rank: int) -> ResolvedAdapter:
        mixed = []
        for found in self._loras.values():
            first = found[0][1]
            rank = sum(lora.rank for _, lora in found)
            if rank > max_rank:
                raise AdapterError(
                    f"the ranks of {', '.join(repr(self._names[i]) for i, _ in found)} are {rank} "
                    f"together at {first.a.name}, at most {max_rank} are served (--max-lora-rank)"
                )
            target = first.target
            a = _made(first.a.name, (rank, target.in_features))
            b = _made(first.b.name, (target.out_features, rank))
            mixed.append(TargetLora(target, a, b, rank, 1.0))
        left_out = dict.fromkeys(text for part in self._parts for text in part.adapter.left_out)
        return ResolvedAdapter(tuple(mixed), left_out=tuple(left_out))

    def _take(self, mixed: TargetLora, read: dict[tuple[int, str], np.ndarray], take: TakeTensors) -> None:
        found, scales = self._loras[mixed.target.index], self._source.parts
        a = [read[i, lora.a.name] * np.float32(lora.scaling * scales[i].scale) for i, lora in found]
        b = [read[i, lora.b.name] for i, lora in found]
        for raw, matrix in ((mixed.a, np.vstack(a)), (mixed.b, np.hstack(b))):
            assert matrix.shape == raw.shape
            take([(raw, matrix.data.cast("B"))])


def open_mix(source: MixSource, open_part: Callable[[str], OpenAdapter], max_rank: int) -> OpenMix:
    """Open the parts of a mix. Raises ``AdapterError`` if they do not add up."""
    with ExitStack() as opened:
        parts = [opened.enter_context(open_part(part.path)) for part in source.parts]
        mix = OpenMix(source, parts, max_rank)
        opened.pop_all()
        return mix


def _by_target(parts: Sequence[OpenAdapter]) -> dict[int, list[tuple[int, TargetLora]]]:
    """Return by index of target, ascending: the parts that change it, and their matrices."""
    found: dict[int, list[tuple[int, TargetLora]]] = {}
    for index, part in enumerate(parts):
        for lora in part.adapter.targets:
            found.setdefault(lora.target.index, []).append((index, lora))
    return dict(sorted(found.items()))


def _made(name: str, shape: tuple[int, ...]) -> RawTensor:
    return RawTensor(name, "F32", shape, 0, math.prod(shape) * _FLOAT32_BYTES)
