"""The engine's interface to adapters on the host, for every way to the device."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from ...runtime.adapters.resolved import AdapterPath
from ...runtime.adapters.target_map import TargetMap
from ...runtime.errors import AdapterError
from ...runtime.memory.host_budget import HostSections
from ...runtime.plan import HostPlace, HostPlaceId
from ...shm.arena import HostArena, extent_sizes
from ..device.base import Stream
from ..device.host_memory import TorchDevice
from ..lora.adapter_layout import AdapterLayout, GroupPlan
from ..lora.base import LoraBackend
from ..lora.factors import ReadBase
from ..lora.matrix_layout import PACKED
from .arrival import AdapterLoad, Copied, InPlace
from .copier import AdapterCopier, DeviceLayout, DevicePages
from .store import AdapterStore, MakeRoom, OpenSource, StoredFacts

_MAX_KEPT = 32  # cached places, by the adapter's shapes


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """Facts of an adapter once it has been read and checked, or begun."""

    digest: str  # as in ``StoredFacts``
    rank: int  # the largest of its targets
    num_bytes: int  # on the device
    host_bytes: tuple[int, ...]  # in the arena, by layer that it has, in whole pages
    rank_sums: tuple[tuple[int, ...], ...]  # as ``AdapterLayers.rank_sums``
    group_bytes: tuple[int, ...]  # copied over the link, by layer group
    group_of_layer: tuple[int, ...]  # the layer group of each layer
    not_by_workers: str  # a part that CPU workers do not compute, e.g. "DoRA"
    left_out: tuple[str, ...]  # phrases: parts of its file that change no text answer, and why
    is_kept: bool  # stored in the place reserved for it
    vocab_size: int | None  # tokens of its own vocabulary; None = the base's
    run_pages: tuple[int, ...]  # of each run on the device; () = the device has no pages


@dataclass(frozen=True, slots=True)
class _Placed:
    """What adapters of one recipe have in common; see ``RegisteredAdapter``."""

    rank_sums: tuple[tuple[int, ...], ...]
    group_bytes: tuple[int, ...]
    group_of_layer: tuple[int, ...]
    has_factors: bool
    not_by_workers: str
    layout: DeviceLayout | None  # on the device, if it is copied


# Layer groups of an adapter with these bytes per layer: by layer, ascending from 0.
GroupLayers = Callable[[Sequence[int]], Sequence[int]]


def one_group(layer_bytes: Sequence[int]) -> Sequence[int]:
    """One group of all layers."""
    return (0,) * len(layer_bytes)


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """The size of the arena, and how the device uses it."""

    num_bytes: int  # of memory, or of addresses if it is elastic
    is_elastic: bool  # memory is allocated per adapter and returned on eviction
    is_device_memory: bool = False  # kernels read the arena itself
    pages: DevicePages | None = None  # target of copies; None = memory is allocated per adapter
    sections: HostSections | None = None  # shared with KV; None = the arena has all its memory
    fill_cpus: tuple[int, ...] = ()  # see ``HostArena.create``


class HostAdapters:
    """The store and its path to the device. Owns ``arena``, which workers may read."""

    def __init__(
        self,
        device: TorchDevice,
        backend: LoraBackend,
        dtype: torch.dtype,
        where: torch.device,
        target_map: TargetMap,
        size: ArenaSize,
        open_source: OpenSource,
        group_layers: GroupLayers = one_group,
    ) -> None:
        """Make the arena. Must precede the device's first operation, as it makes streams.

        Raises ``SpaceError`` if the machine has too little memory, ``DeviceError`` if the device
        refuses the arena.
        """
        layout = AdapterLayout(target_map, backend.layout if size.is_device_memory else PACKED, dtype)
        self._layout = layout
        self._backend = backend
        self._group_layers = group_layers
        targets = target_map.targets
        self._num_layers = 1 + max((target.layer for target in targets), default=-1)
        inside = [target.input_group for target in target_map.inside]
        self._num_groups = 1 + max(inside, default=-1)
        self._placements: dict[str, DeviceLayout] = {}  # by digest; of adapters that are copied
        self._place_once = lru_cache(_MAX_KEPT)(self._place)
        self._copier: AdapterCopier | None = None
        if not size.is_device_memory:
            section_bytes = size.num_bytes if size.sections is None else size.sections.section_bytes
            self._copier = AdapterCopier(device, where, layout, backend.layout, size.pages, section_bytes)
        in_sections = size.sections is not None
        arena = HostArena.create(
            size.num_bytes, is_elastic=size.is_elastic, in_sections=in_sections, fill_cpus=size.fill_cpus
        )
        try:
            self.store = AdapterStore(
                arena, layout, open_source, device, size.sections, is_read_in_place=size.is_device_memory
            )
        except BaseException:
            arena.segment.drop()  # its registration may have a view
            raise
        self.arena = arena

    def set_base(self, read_base: ReadBase) -> None:
        """Set the base's weights, which adapters with factors need."""
        self._layout.read_base = read_base

    def set_compute_stream(self, compute: Stream) -> None:
        """Set the stream on which kernels read copies; see ``AdapterCopier.set_compute_stream``."""
        if self._copier is not None:
            self._copier.set_compute_stream(compute)

    def outline(self, path: AdapterPath) -> tuple[int, int, tuple[str, ...]]:
        """Check all of an adapter but its values.

        Returns its largest rank, its bytes on the device, and the parts of its file that change no
        text answer, as phrases. Raises ``AdapterError`` naming what is wrong.
        """
        adapter, plans = self.store.outline(path)
        host_bytes = extent_sizes([plan.spec for plan in plans])
        num_bytes = self._device_bytes(path, host_bytes, self._place_once(plans).layout)
        return adapter.max_rank, num_bytes, adapter.left_out

    def register(self, path: AdapterPath, make_room: MakeRoom) -> RegisteredAdapter:
        """Read and check an adapter, and store it if ``make_room`` returns a place.

        Raises ``AdapterError`` naming what is wrong.
        """
        return self._facts(path, self.store.register(path, partial(self._make_room, make_room)))

    def begin(self, path: AdapterPath) -> RegisteredAdapter | None:
        """Register an adapter whose values are read and checked by its first load.

        None if it must be read before. Raises ``AdapterError`` naming what is wrong.
        """
        facts = None if self._copier is None else self.store.begin(path)
        return None if facts is None else self._facts(path, facts)

    def _facts(self, path: AdapterPath, facts: StoredFacts) -> RegisteredAdapter:
        """The facts of an adapter for the engine. Raises ``AdapterError`` if it can never fit."""
        placed = self._place_once(facts.plans)
        if placed.has_factors:
            self._backend.prepare_factors()
        try:
            num_bytes = self._device_bytes(path, facts.host_bytes, placed.layout)
        except AdapterError:
            self.store.remove_content(facts.digest)
            raise
        if placed.layout is not None:
            self._placements[facts.digest] = placed.layout
        return RegisteredAdapter(
            facts.digest,
            facts.rank,
            num_bytes,
            facts.host_bytes,
            placed.rank_sums,
            placed.group_bytes,
            placed.group_of_layer,
            placed.not_by_workers,
            facts.left_out,
            facts.is_kept,
            _vocab_size(facts.plans),
            () if placed.layout is None else placed.layout.run_pages,
        )

    def _place(self, plans: tuple[GroupPlan, ...]) -> _Placed:
        layer_bytes, rank_sums = self._layers_of(plans)
        group_of_layer = tuple(self._group_layers(layer_bytes))
        group_bytes = [0] * (max(group_of_layer) + 1)
        for group, size in zip(group_of_layer, layer_bytes, strict=True):
            group_bytes[group] += size
        has_factors = any(at.factor_offset for plan in plans for at in plan.region.targets)
        not_by_workers = ["DoRA"] if has_factors else []
        changed = [one.target for plan in plans for one in (*plan.loras, *plan.rows) if one is not None]
        if any(target.is_embedding for target in changed):
            not_by_workers.append("embeddings")
        if any(target.is_head for target in changed):
            not_by_workers.append("the output head")
        layout = None if self._copier is None else self._copier.place(plans, group_of_layer)
        without = " and ".join(not_by_workers)
        return _Placed(rank_sums, tuple(group_bytes), group_of_layer, has_factors, without, layout)

    def fetch(self, digest: str, path: AdapterPath, place: HostPlace) -> AdapterLoad:
        """Start to bring the adapter with this content to the device; see ``AdapterStore.fetch``.

        ``AdapterLoad.read`` must be called for it unless its place is filled.
        """
        host = self.store.fetch(digest, path, place)
        if self._copier is None:
            return InPlace(host, self._layout)
        return Copied(host, self._copier, self._placements[digest])

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None:
        """Remove adapters from the arena."""
        self.store.evict(place_ids)

    def remove_content(self, digest: str) -> None:
        """Remove what is stored for this content, which no version has any more."""
        self._placements.pop(digest, None)
        self.store.remove_content(digest)

    def close(self) -> None:
        """Release the memory; the device must be idle. Idempotent."""
        self.store.close()
        if self._copier is not None:
            self._copier.close()

    def _make_room(self, make_room: MakeRoom, layer_bytes: Sequence[int]) -> HostPlace | None:
        self._check_arena(layer_bytes)
        return make_room(layer_bytes)

    def _check_arena(self, layer_bytes: Sequence[int]) -> None:
        """Refuse an adapter that is larger than the arena."""
        if self._copier is not None and sum(layer_bytes) > self.arena.capacity_bytes:
            raise AdapterError(
                f"an adapter of {sum(layer_bytes)} bytes does not fit the host adapter arena of "
                f"{self.arena.capacity_bytes} bytes; raise --host-bytes"
            )

    def _device_bytes(
        self, path: AdapterPath, host_bytes: Sequence[int], placement: DeviceLayout | None
    ) -> int:
        """Device memory of an adapter; ``placement``: there, if it is copied.

        Raises ``AdapterError`` if it can never fit.
        """
        if self._copier is None or placement is None:
            return sum(host_bytes)
        self._check_arena(host_bytes)
        pages_bytes = self._copier.pages_bytes
        if pages_bytes is not None and placement.num_bytes > pages_bytes:
            raise AdapterError(
                f"{path} takes {placement.num_bytes} bytes on the device, and adapters and KV together "
                f"have {pages_bytes}; raise --memory-gib"
            )
        return placement.num_bytes

    def _layers_of(self, plans: Sequence[GroupPlan]) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
        """Bytes copied over the link, and sums of ranks in whole tiles, by layer."""
        layer_bytes = [0] * self._num_layers
        rank_sums = [[0] * self._num_groups for _ in range(self._num_layers)]
        for plan in plans:
            layer, group = plan.key
            layer_bytes[layer] += plan.region.num_bytes
            if 0 <= group < self._num_groups:  # predictions leave out what is outside of layers
                rank_sums[layer][group] = plan.region.padded_ranks
        return layer_bytes, tuple(tuple(ranks) for ranks in rank_sums)


def _vocab_size(plans: Iterable[GroupPlan]) -> int | None:
    """Tokens of an adapter's own vocabulary; None = that of the base."""
    rows = [rows for plan in plans for rows in plan.rows if rows is not None]
    sizes = {one.num_tokens for one in rows if one.num_tokens != one.target.num_tokens}
    return max(sizes, default=None)
