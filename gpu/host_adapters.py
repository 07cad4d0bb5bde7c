"""What the engine asks of the adapters on the host, whichever way they reach the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..runtime.adapters.target_map import TargetMap
from ..shm.arena import HostArena
from .adapter_arrival import AdapterCopier, Copied, InPlace
from .adapter_loader import Arrival
from .adapter_store import AdapterStore, OpenSource
from .device.host_memory import TorchDevice
from .lora.adapter_layout import AdapterLayout
from .lora.base import LoraBackend
from .lora.matrix_layout import PACKED


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """What is known of an adapter once it has been read and checked."""

    digest: str
    rank: int  # the largest of its targets
    num_bytes: int  # on the device


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """How large the arena is, and what it is to the device."""

    num_bytes: int  # of memory, or of addresses if it is elastic
    is_elastic: bool  # memory is taken when adapters come and returned when they go
    # If the kernels read the arena itself, what of the budget that it shares with KV blocks may
    # hold adapters that no request uses; else None.
    budget_bytes: int | None = None
    idle_bytes: int | None = None

    @property
    def is_device_memory(self) -> bool:
        """Whether the kernels read the arena itself."""
        return self.budget_bytes is not None


class HostAdapters:
    """The store, and the way from it to the device. Owns ``arena``, which workers may read."""

    def __init__(
        self, device: TorchDevice, backend: LoraBackend, dtype: torch.dtype, where: torch.device,
        target_map: TargetMap, size: ArenaSize, open_source: OpenSource,
    ) -> None:  # fmt: skip
        """Make the arena. Before the device's first operation, for its stream.

        Raises ``SpaceError`` if the machine has too little memory, ``DeviceError`` if the device
        refuses the arena.
        """
        self._size = size
        layout = AdapterLayout(
            target_map, backend.layout if size.is_device_memory else PACKED, dtype
        )
        self._layout = layout
        self._copier: AdapterCopier | None = None
        if not size.is_device_memory:
            self._copier = AdapterCopier(device, where, layout, backend.layout)
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
    def on_kv_bytes(self) -> Callable[[int], None] | None:
        """To be told how much of the budget KV blocks hold, if adapters share it."""
        return self._note_kv_bytes if self._size.is_device_memory else None

    def register(self, path: str) -> RegisteredAdapter:
        """Read and check an adapter; it stays in the arena while there is room.

        Raises ``AdapterError`` naming what is wrong.
        """
        facts = self._store.register(path)
        num_bytes = facts.host_bytes
        if self._copier is not None:
            num_bytes = self._copier.device_bytes(facts.plans)
        return RegisteredAdapter(facts.digest, facts.rank, num_bytes)

    def fetch(self, digest: str, path: str) -> Arrival:
        """Begin to bring an adapter to the device by its content; see ``AdapterStore.fetch``."""
        host = self._store.fetch(digest, path)
        return InPlace(host, self._layout) if self._copier is None else Copied(host, self._copier)

    def forget(self, digest: str) -> None:
        """No version has this content any more."""
        self._store.forget(digest)

    def close(self) -> None:
        """Give the memory back; the device must have come to its end. Idempotent."""
        self._store.close()

    def _note_kv_bytes(self, num_bytes: int) -> None:
        """Adapters that nobody uses give way to KV blocks at once."""
        size = self._size
        if size.budget_bytes is not None:
            assert size.idle_bytes is not None
            left_bytes = max(0, size.budget_bytes - num_bytes)
            self._store.keep_within(min(left_bytes, size.idle_bytes))
