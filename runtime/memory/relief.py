"""Frees memory of idle KV and adapters while the machine is short of memory. Pure.

If the model runs on a CPU, KV of ended requests and unused adapters occupy memory that other
programs could use. Memory of running requests is never freed here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..plan import BASE_ADAPTER, BlockId, HostPlaceId
from .adapter_cache import AdapterCache
from .adapter_log import EvictionReason
from .block_pool import BlockPool
from .host_cache import HostCache
from .room import RoomMaker

# Available shares of all memory.
_NEAR_SHARE = 0.20  # below this, memory may be short soon
_SHORT_SHARE = 0.10  # below this, idle items are evicted
_AIM_SHARE = 0.12  # target of evictions
_ENOUGH_SHARE = 0.15  # from this on, for 30 seconds, the limit is lifted
_CALM_S = 30.0


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory of the machine, or of the control group that is nearest to its limit."""

    available_bytes: int
    total_bytes: int

    @property
    def is_short(self) -> bool:
        """Whether idle items must be evicted."""
        return self.available_bytes < _SHORT_SHARE * self.total_bytes

    @property
    def is_nearly_short(self) -> bool:
        return self.available_bytes < _NEAR_SHARE * self.total_bytes

    @property
    def is_enough(self) -> bool:
        """Whether the limit may be lifted if this lasts."""
        return self.available_bytes >= _ENOUGH_SHARE * self.total_bytes


@dataclass(slots=True, eq=False)
class MemoryRelief:
    """Limits the memory of KV and adapters while memory is short, by evicting idle items."""

    _pool: BlockPool
    _cache: AdapterCache
    _room: RoomMaker
    _host: HostCache | None
    _look: Callable[[], MemoryRoom | None] = lambda: None
    _on_end: Callable[[], None] = lambda: None
    _limit_bytes: int | None = None
    _enough_since_s: float | None = None
    num_bytes: int = 0  # evicted in all

    @property
    def is_active(self) -> bool:
        """Whether there is a limit."""
        return self._limit_bytes is not None

    def watch(self, look: Callable[[], MemoryRoom | None], on_end: Callable[[], None]) -> None:
        """Set the source of measurements.

        Args:
            look: Called before each step; returns the newest measurement if it matters.
            on_end: Called when the limit is lifted.
        """
        self._look = look
        self._on_end = on_end

    def apply_limit(self, now_s: float) -> None:
        """Evict what exceeds the limit, with the next plan. Cheap without a limit."""
        room = self._look()
        if room is not None:
            self._observe(room, now_s)
        if self._limit_bytes is None:
            return
        kept_bytes = self._held_bytes - self._pool.num_warm_blocks * self._pool.block_bytes
        excess_bytes = min(kept_bytes - self._limit_bytes, self._evictable_bytes + self._idle_host_bytes)
        if excess_bytes <= 0:
            return
        self.num_bytes += excess_bytes
        # ``take_host_evictions`` evicts the idle adapters on the host, here the rest.
        if excess_bytes > self._idle_host_bytes:
            self._room.free_up(
                excess_bytes - self._idle_host_bytes,
                0,
                include_waiting=False,
                keep=BASE_ADAPTER,
                reason=EvictionReason.MACHINE,
            )

    def take_freed_blocks(self, *, is_needed: bool) -> tuple[BlockId, ...]:
        """Return free blocks to decommit in the next plan. ``is_needed``: memory is needed now."""
        if is_needed or self._limit_bytes is not None:
            return self._pool.take_warm_blocks()
        return ()

    def take_host_evictions(self) -> tuple[HostPlaceId, ...]:
        """Return the host's evictions for the next plan.

        Call it after ``take_freed_blocks`` and all loads of the plan.
        """
        if self._host is None:
            return ()
        if self._host.is_device_memory:
            limit_bytes = self._pool.budget.capacity_bytes
            if self._limit_bytes is not None:
                limit_bytes = min(limit_bytes, self._limit_bytes)
            limit_bytes -= self._pool.written_bytes
            if self._cache.limit_bytes is not None:
                limit_bytes = min(limit_bytes, self._cache.limit_bytes)
            self._host.keep_within(max(0, limit_bytes))
        return self._host.take_evictions()

    def _observe(self, room: MemoryRoom, now_s: float) -> None:
        """Lower the limit while memory is short. Lift it after 30 seconds with enough memory."""
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
        """Memory of all KV and adapters, including those in use."""
        adapter_bytes = self._cache.used_bytes
        if self._host is not None and self._host.is_device_memory:
            adapter_bytes = self._host.taken_bytes
        return self._pool.written_bytes + adapter_bytes

    @property
    def _evictable_bytes(self) -> int:
        """Memory of unused KV and evictable adapters on the device."""
        adapter_bytes = 0
        if self._cache.limit_bytes is None:
            adapter_bytes = self._cache.evictable_bytes(include_waiting=False, keep=BASE_ADAPTER)
        return self._pool.num_cached_blocks * self._pool.block_bytes + adapter_bytes

    @property
    def _idle_host_bytes(self) -> int:
        """Memory of idle adapters on the host, if that is the device's memory."""
        if self._host is None or not self._host.is_device_memory:
            return 0
        return self._host.idle_bytes
