"""An adapter of zeros for all targets of a model, for measurements without files."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Self

from ...adapters.digest import ContentDigest
from ...adapters.resolved import RawTensor, ResolvedAdapter, TakeTensor, TargetLora

if TYPE_CHECKING:
    from ...adapters.target_map import Target, TargetMap

_TYPE, _ITEM_BYTES = "BF16", 2


class MadeUpAdapter:
    """See the module; an ``AdapterReader``."""

    def __init__(self, target_map: "TargetMap", rank: int) -> None:
        self.adapter = ResolvedAdapter(tuple(_lora(one, rank) for one in target_map.inside))
        self.outline = self.adapter
        self.digest = ContentDigest(b"made up", ())

    def expect(self, digest: ContentDigest) -> None:
        """See ``AdapterReader``."""
        assert digest == self.digest, "there is only one content"

    def read_layers(self, take: TakeTensor) -> Iterator[int]:
        """See ``AdapterReader``."""
        by_layer = sorted(self.adapter.targets, key=lambda lora: lora.target.layer)
        for layer, loras in groupby(by_layer, key=lambda lora: lora.target.layer):
            for lora in loras:
                for raw in (lora.a, lora.b):
                    take(raw, memoryview(bytearray(raw.num_bytes)))
            yield layer

    def close(self) -> None:
        """There is no file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lora(target: "Target", rank: int) -> TargetLora:
    a = _tensor(f"{target.path}.a", (rank, target.in_features))
    b = _tensor(f"{target.path}.b", (target.out_features, rank))
    return TargetLora(target, a, b, rank, 1.0)


def _tensor(name: str, shape: tuple[int, int]) -> RawTensor:
    return RawTensor(name, _TYPE, shape, 0, _ITEM_BYTES * shape[0] * shape[1])
