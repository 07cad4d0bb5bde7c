"""One budget of host memory for adapters and KV: which sections of it each of the two has. Pure.

Adapters lie in one segment, KV in another. Both have addresses for the whole budget, and memory
only for their sections. So memory moves from one to the other without moving what stays.

If one side has evicted something for room, and at least half of a section of the other side was
used before that, or not at all, this section moves. So both together evict nearly in the order of
use, as one memory would. A load without room takes a section in any case, unless open copies use
all of them.
"""

import itertools
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from ..errors import ConfigError
from ..plan import HostMove, TransferId, TransferResult
from .host_cache import HostCache
from .prefix_cache import HostSlots, PrefixCache

# CUDA registers and releases a section's memory between two steps of the engine, which wait for it:
# some ten milliseconds for this many bytes.
_MAX_SECTION_BYTES = 64 * 2**20
_MIN_SECTIONS = 64  # unless a block is larger
_MAX_FIRST_ADAPTER_BYTES = 8 * 2**30
_LOOK_EVERY_S = 1.0
_TURN_S = 10.0  # before a section moves in the other direction
_MAX_WARM_SHARE = 0.5  # of a section that moves


@dataclass(frozen=True, slots=True)
class HostSections:
    """The division of the budget."""

    num_sections: int
    section_bytes: int  # whole pages
    slots_per_section: int  # each for a KV block
    num_adapter_sections: int  # at first; KV has the others

    @classmethod
    def of(cls, num_bytes: int, block_bytes: int) -> Self:
        """Divide ``num_bytes``. At first adapters have a half, and at most 8 GiB.

        Raises ``ConfigError`` if a block and a section of adapters do not fit.
        """
        wanted_bytes = min(_MAX_SECTION_BYTES, num_bytes // _MIN_SECTIONS)
        slots_per_section = max(1, wanted_bytes // block_bytes)
        section_bytes = -(-slots_per_section * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        num_sections = num_bytes // section_bytes
        if num_sections < 2:
            raise ConfigError(
                f"--host-bytes is {num_bytes}, but KV and adapters need {section_bytes} bytes each, for a "
                "KV block; raise it"
            )
        num_adapter_sections = max(1, min(num_sections // 2, _MAX_FIRST_ADAPTER_BYTES // section_bytes))
        return cls(num_sections, section_bytes, slots_per_section, num_adapter_sections)

    @property
    def num_bytes(self) -> int:
        """All sections together, and the addresses of adapters."""
        return self.num_sections * self.section_bytes

    @property
    def num_kv_sections(self) -> int:
        """Sections that KV has at first."""
        return self.num_sections - self.num_adapter_sections

    @property
    def num_slots(self) -> int:
        """KV blocks that all sections hold."""
        return self.num_sections * self.slots_per_section


@dataclass(slots=True, eq=False)
class HostBudget:
    """Moves sections between adapters and KV, one at a time. Both are empty at first."""

    sections: HostSections
    _cache: HostCache
    _slots: HostSlots
    _prefixes: PrefixCache  # drops KV of the slots
    _new_id: Callable[[], TransferId]  # of moves
    _move: HostMove | None = None  # until it has ended
    _is_sent: bool = False
    _look_at_s: float = -math.inf
    # When a move is tried again that failed or that open copies prevent; None = none is.
    wake_at_s: float | None = None
    _is_last_to_kv: bool = False
    _turn_at_s: float = -math.inf  # before it no section moves in the other direction

    def __post_init__(self) -> None:
        one, next_use = self.sections, itertools.count(1).__next__
        self._cache.divide(one.section_bytes, range(one.num_adapter_sections, one.num_sections), next_use)
        self._slots.divide(one.slots_per_section, range(one.num_kv_sections, one.num_sections), next_use)

    def take_command(self, now_s: float) -> HostMove | None:
        """Return the move for the next plan, if any. What lay in its section has been evicted."""
        if self._move is None and (self.wake_at_s is None or now_s >= self.wake_at_s):
            self.wake_at_s = None
            if self._cache.is_short:
                found = self._slots.coldest_section(since=0)
                if found is None:
                    self.wake_at_s = now_s + _LOOK_EVERY_S
                else:
                    self._begin(found[1], now_s, to_kv=False)
            elif now_s >= self._look_at_s:
                self._look(now_s)
        if self._is_sent:
            return None
        self._is_sent = True
        return self._move

    def repeat(self) -> None:
        """Return the move for one more plan, unless it ends before: a plan was lost."""
        self._is_sent = False

    def end(self, result: TransferResult, now_s: float) -> None:
        """Apply the end of a move; ignores that of other transfers."""
        move = self._move
        if move is None or move.transfer_id != result.transfer_id:
            return
        self._move = None
        has_failed = result.error is not None
        if has_failed:
            self.wake_at_s = now_s + _LOOK_EVERY_S
        section = move.source if has_failed else move.target
        if move.to_kv == has_failed:
            self._cache.take_section(section)
        else:
            self._slots.take_section(section)

    def _look(self, now_s: float) -> None:
        """Let a section move if the other side has evicted what was used after half of it.

        KV keeps a section here. If it has none, the least used one of adapters moves.
        """
        self._look_at_s = now_s + _LOOK_EVERY_S
        cache, slots = self._cache, self._slots
        num_kv_sections = self.sections.num_sections - len(slots.away)
        for to_kv, lost_use, giver in ((False, cache.lost_use, slots), (True, slots.lost_use, cache)):
            if lost_use is None or (to_kv != self._is_last_to_kv and now_s < self._turn_at_s):
                continue
            if not to_kv and num_kv_sections <= 1:
                continue
            max_warm_share = _MAX_WARM_SHARE if num_kv_sections else 1.0
            found = giver.coldest_section(since=lost_use if num_kv_sections else cache.oldest_use)
            if found is not None and found[0] <= max_warm_share:
                self._begin(found[1], now_s, to_kv=to_kv)
                break
        cache.lost_use = slots.lost_use = None

    def _begin(self, source: int, now_s: float, *, to_kv: bool) -> None:
        """Begin to move a section."""
        if to_kv:
            self._cache.give_section(source)
            target = min(self._slots.away)
        else:
            self._prefixes.give_host_section(source)
            target = min(self._cache.away)
        self._move, self._is_sent = HostMove(self._new_id(), to_kv, source, target), False
        self._is_last_to_kv, self._turn_at_s = to_kv, now_s + _TURN_S
