"""What the engine asks of the adapters on the host, whichever way they reach the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...runtime.adapters.target_map import TargetMap
from ...runtime.errors import AdapterError
from ...shm.arena import HostArena
from ..device.base import Stream
from ..device.host_memory import TorchDevice
from ..lora.adapter_layout import AdapterLayout, GroupPlan
from ..lora.base import LoraBackend
from ..lora.matrix_layout import PACKED
from .arrival import Copied
from .copier import AdapterCopier, SlabSize
from .fetcher import Arrival
from .in_place import InPlace
from .placement import Placement
from .store import AdapterStore, HostAdapter, OpenSource


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """What is known of an adapter once it has been read and checked."""

    digest: str
    rank: int  # the largest of its targets
    num_bytes: int  # on the device


@dataclass(frozen=True, slots=True)
class AdapterExtent:
    """An adapter as the planner of cold starts sees it."""

    num_bytes: int  # on the device
    layer_bytes: tuple[int, ...]  # that move over the link, by layer
    rank_sums: tuple[tuple[int, ...], ...]  # [layer][input group]: ranks of the group's targets
    group_of_layer: tuple[int, ...]  # which layers are copied together


# Layer groups of an adapter with so many bytes in each layer: by layer, ascending from 0.
GroupLayers = Callable[[Sequence[int]], Sequence[int]]


def one_group(layer_bytes: Sequence[int]) -> Sequence[int]:
    """All layers together."""
    return (0,) * len(layer_bytes)


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """How large the arena is, and what it is to the device."""

    num_bytes: int  # of memory, or of addresses if it is elastic
    is_elastic: bool  # memory is taken when adapters come and returned when they go
    # If the kernels read the arena itself, what of the budget that it shares with KV blocks may
    # hold adapters that no request uses; else None.
    budget_bytes: int | None = None
    idle_bytes: int | None = None
    slab: SlabSize | None = None  # that copies go to; None = memory is taken for each

    @property
    def is_device_memory(self) -> bool:
        """Whether the kernels read the arena itself."""
        return self.budget_bytes is not None


class HostAdapters:
    """The store, and the way from it to the device. Owns ``arena``, which workers may read."""

    def __init__(
        self, device: TorchDevice, backend: LoraBackend, dtype: torch.dtype, where: torch.device,
        target_map: TargetMap, size: ArenaSize, open_source: OpenSource,
        group_layers: GroupLayers = one_group,
    ) -> None:  # fmt: skip
        """Make the arena. Before the device's first operation, for its streams.

        Raises ``SpaceError`` if the machine has too little memory, ``ResourceError`` if the slab
        is too small, ``DeviceError`` if the device refuses the arena.
        """
        self._size = size
        layout = AdapterLayout(
            target_map, backend.layout if size.is_device_memory else PACKED, dtype
        )
        self._layout = layout
        self._group_layers = group_layers
        self._num_layers = 1 + max(target.layer for target in target_map.targets)
        self._num_groups = 1 + max(target.input_group for target in target_map.targets)
        self._extents: dict[str, AdapterExtent] = {}  # by digest
        self._placements: dict[str, Placement] = {}  # by digest, of adapters that are copied
        self._copier: AdapterCopier | None = None
        if not size.is_device_memory:
            self._copier = AdapterCopier(device, where, layout, backend.layout, size.slab)
        hint = "raise --memory-gib" if size.is_device_memory else "raise --host-adapter-bytes"
        arena = HostArena.create(size.num_bytes, is_elastic=size.is_elastic, hint=hint)
        try:
            self._store = AdapterStore(
                arena, layout, open_source, device, is_device_memory=size.is_device_memory
            )
        except BaseException:
            arena.close()
            raise
        self.arena = arena
        self._note_kv_bytes(0)

    @property
    def slab_bytes(self) -> int | None:
        """What all adapters on the device may take; None = they share memory with KV blocks."""
        return None if self._copier is None else self._copier.slab_bytes

    @property
    def on_kv_bytes(self) -> Callable[[int], None] | None:
        """To be told how much of the budget KV blocks hold, if adapters share it."""
        return self._note_kv_bytes if self._size.is_device_memory else None

    def read_by(self, compute: Stream) -> None:
        """Say on which stream kernels read what was copied; see ``AdapterCopier.read_by``."""
        if self._copier is not None:
            self._copier.read_by(compute)

    def register(self, path: str) -> RegisteredAdapter:
        """Read and check an adapter; it stays in the arena while there is room.

        Raises ``AdapterError`` naming what is wrong.
        """
        facts = self._store.register(path)
        num_bytes = facts.host_bytes
        if self._copier is not None:
            num_bytes = self._copier.device_bytes(facts.plans)
        if self.slab_bytes is not None and num_bytes > self.slab_bytes:
            self._store.forget(facts.digest)
            raise AdapterError(
                f"{path} takes {num_bytes} bytes on the device, and all adapters together have "
                f"{self.slab_bytes} (raise --adapter-memory-fraction or --memory-gib)"
            )
        extent = self._extents[facts.digest] = self._extent(facts.plans, num_bytes)
        if self._copier is not None:
            placement = self._copier.place(facts.plans, extent.group_of_layer)
            self._placements[facts.digest] = placement
        return RegisteredAdapter(facts.digest, facts.rank, num_bytes)

    def extent(self, digest: str) -> AdapterExtent:
        """What is known of a registered adapter's layers."""
        return self._extents[digest]

    def is_on_host(self, digest: str) -> bool:
        """Whether its layers can move at once; else files are read first."""
        return self._store.is_present(digest)

    def fetch(self, digest: str, path: str) -> Arrival:
        """Begin to bring an adapter to the device by its content; see ``AdapterStore.fetch``.

        ``Arrival.read`` must be called for it.
        """
        return self._arrival(digest, self._store.fetch(digest, path))

    def fetch_present(self, digest: str) -> Arrival | None:
        """``fetch`` if no file must be read for it; else None."""
        host = self._store.fetch_present(digest)
        return None if host is None else self._arrival(digest, host)

    def forget(self, digest: str) -> None:
        """No version has this content any more."""
        self._extents.pop(digest, None)
        self._placements.pop(digest, None)
        self._store.forget(digest)

    def close(self) -> None:
        """Give the memory back; the device must have come to its end. Idempotent."""
        self._store.close()
        if self._copier is not None:
            self._copier.close()

    def _arrival(self, digest: str, host: HostAdapter) -> Arrival:
        if self._copier is None:
            return InPlace(host, self._layout)
        return Copied(host, self._copier, self._placements[digest])

    def _extent(self, plans: Sequence[GroupPlan], num_bytes: int) -> AdapterExtent:
        layer_bytes = [0] * self._num_layers
        rank_sums = [[0] * self._num_groups for _ in range(self._num_layers)]
        for plan in plans:
            layer, group = plan.key
            layer_bytes[layer] += plan.region.num_bytes
            rank_sums[layer][group] = plan.region.rank_sum
        return AdapterExtent(
            num_bytes,
            tuple(layer_bytes),
            tuple(tuple(ranks) for ranks in rank_sums),
            tuple(self._group_layers(layer_bytes)),
        )

    def _note_kv_bytes(self, num_bytes: int) -> None:
        """Adapters that nobody uses give way to KV blocks at once."""
        size = self._size
        if size.budget_bytes is not None:
            assert size.idle_bytes is not None
            left_bytes = max(0, size.budget_bytes - num_bytes)
            self._store.keep_within(min(left_bytes, size.idle_bytes))
