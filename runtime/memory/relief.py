"""What holds memory for later gives way while the machine runs short of it. Pure.

The memory is the machine's own where the model runs on a CPU: KV of requests that have ended and
adapters that nothing uses are then what other programs could use. Nothing that runs gives way.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..plan import BASE_ADAPTER, BlockId
from .adapter_cache import AdapterCache
from .adapter_log import EvictionReason
from .block_pool import BlockPool
from .host_cache import HostCache
from .room import RoomMaker

_NEAR_SHARE = 0.20  # of all memory that is available, below which memory may soon be short
_SHORT_SHARE = 0.10  # of all memory that is available, below which idle items give way,
_AIM_SHARE = 0.12  # to which they do,
_ENOUGH_SHARE = 0.15  # and from which on
_CALM_S = 30.0  # for so long they may come back


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """What the machine has, or the control group that is nearest to its limit."""

    available_bytes: int
    total_bytes: int

    @property
    def is_short(self) -> bool:
        """Whether idle items are to give way."""
        return self.available_bytes < _SHORT_SHARE * self.total_bytes

    @property
    def is_nearly_short(self) -> bool:
        """Whether it may be short a moment later."""
        return self.available_bytes < _NEAR_SHARE * self.total_bytes

    @property
    def is_enough(self) -> bool:
        """Whether, if it stays so, they may come back."""
        return self.available_bytes >= _ENOUGH_SHARE * self.total_bytes


class MemoryRelief:
    """Holds KV and adapters to a limit while memory is short, as far as idle ones can give way."""

    def __init__(
        self, pool: BlockPool, cache: AdapterCache, room: RoomMaker, host: HostCache | None
    ) -> None:
        """All are the device memory's own; there is no limit at first."""
        self._pool = pool
        self._cache = cache
        self._room = room
        self._host = host
        self._look: Callable[[], MemoryRoom | None] = lambda: None
        self._on_end: Callable[[], None] = lambda: None
        self._limit_bytes: int | None = None
        self._enough_since_s: float | None = None
        self.num_bytes = 0  # that idle items have given way in all

    @property
    def is_active(self) -> bool:
        """Whether there is a limit."""
        return self._limit_bytes is not None

    def watch(self, look: Callable[[], MemoryRoom | None], on_end: Callable[[], None]) -> None:
        """Ask ``look`` before each step: what was seen of memory since, if it matters.

        ``on_end``: called when idle items may take memory again.
        """
        self._look = look
        self._on_end = on_end

    def apply_limit(self, now_s: float) -> None:
        """Evict what is over the limit, with the next plan. Little more than a call, without."""
        room = self._look()
        if room is not None:
            self._observe(room, now_s)
        if self._limit_bytes is None:
            return
        kept_bytes = self._held_bytes - self._pool.num_warm_blocks * self._pool.block_bytes
        excess_bytes = min(kept_bytes - self._limit_bytes, self._device_bytes + self._host_bytes)
        if excess_bytes <= 0:
            return
        self.num_bytes += excess_bytes
        if excess_bytes > self._host_bytes:
            self._room.free_up(
                excess_bytes - self._host_bytes, 0, include_waiting=False, keep=BASE_ADAPTER,
                reason=EvictionReason.MACHINE,
            )  # fmt: skip

    def take_freed_blocks(self, *, is_needed: bool) -> tuple[BlockId, ...]:
        """Blocks that give memory back with the next plan; ``is_needed``: it is needed now."""
        if is_needed or self._limit_bytes is not None:
            return self._pool.take_warm_blocks()
        return ()

    def host_limit_bytes(self, num_bytes: int) -> int:
        """What adapters may take on the host, of ``num_bytes`` that they could have.

        To be asked when freed blocks have been taken.
        """
        if self._limit_bytes is None:
            return num_bytes
        return min(num_bytes, max(0, self._limit_bytes - self._pool.written_bytes))

    def _observe(self, room: MemoryRoom, now_s: float) -> None:
        """Lower the limit while memory is short; lift it when there has been enough for a while."""
        if room.is_short:
            short_bytes = int(_AIM_SHARE * room.total_bytes) - room.available_bytes
            self._limit_bytes = max(0, self._held_bytes - short_bytes)
        if not room.is_enough:
            self._enough_since_s = None
        elif self._enough_since_s is None:
            self._enough_since_s = now_s
        elif now_s - self._enough_since_s >= _CALM_S:
            self._limit_bytes = self._enough_since_s = None
            self._on_end()

    @property
    def _held_bytes(self) -> int:
        """What KV and adapters hold of the machine's memory, those in use included."""
        adapter_bytes = self._cache.used_bytes
        if self._host is not None and self._host.is_device_memory:
            adapter_bytes = self._host.taken_bytes
        return self._pool.written_bytes + adapter_bytes

    @property
    def _device_bytes(self) -> int:
        """KV that no request uses, and adapters that could go now."""
        adapter_bytes = 0
        if self._cache.slab is None:
            adapter_bytes = self._cache.evictable_bytes(include_waiting=False, keep=BASE_ADAPTER)
        return self._pool.num_cached_blocks * self._pool.block_bytes + adapter_bytes

    @property
    def _host_bytes(self) -> int:
        """Adapters that lie in the device's memory and that the device does not know."""
        if self._host is None or not self._host.is_device_memory:
            return 0
        return self._host.idle_bytes
