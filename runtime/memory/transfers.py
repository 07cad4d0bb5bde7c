"""The table of open transfers between host and device. Pure.

The memory begins and ends transfers here. Predictions of their ends read it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...profiles.link import Direction
from ..adapter import AdapterFacts
from ..plan import (
    AdapterId,
    AdapterTransfer,
    KvTransfer,
    Transfer,
    TransferId,
    TransferProgress,
    TransferRead,
)
from .kv_tree import KvNode


class LinkKey(NamedTuple):
    """A direction and a kind of content, which have totals of their own."""

    direction: Direction
    kind: str  # "adapter" or "kv"


class LinkTotals(NamedTuple):
    """Totals since the start."""

    num_bytes: int
    busy_s: float  # time with at least one transfer to copy


class LinkUse:
    """Counts copied bytes, and the time in which there was anything to copy."""

    def __init__(self) -> None:
        self._num_bytes: dict[LinkKey, int] = {}
        self._busy_s: dict[LinkKey, float] = {}  # up to ``_since_s``
        self._since_s: dict[LinkKey, float] = {}  # of busy keys
        self._busy: dict[LinkKey, set[TransferId]] = {}

    def changed(
        self, key: LinkKey, transfer_id: TransferId, now_s: float, *, is_busy: bool, new_bytes: int = 0
    ) -> None:
        """Record that a transfer has begun, progressed or ended.

        ``is_busy``: it has something to copy now.
        """
        busy = self._busy.setdefault(key, set())
        self._num_bytes[key] = self._num_bytes.get(key, 0) + new_bytes
        was_busy = bool(busy)
        if is_busy:
            busy.add(transfer_id)
        else:
            busy.discard(transfer_id)
        if busy and not was_busy:
            self._since_s[key] = now_s
        elif was_busy and not busy:
            self._busy_s[key] = self._busy_s.get(key, 0.0) + now_s - self._since_s.pop(key)

    def totals(self, now_s: float) -> dict[LinkKey, LinkTotals]:
        return {
            key: LinkTotals(num_bytes, self._busy_s.get(key, 0.0) + now_s - self._since_s.get(key, now_s))
            for key, num_bytes in self._num_bytes.items()
        }


@dataclass(slots=True, eq=False, kw_only=True)
class OpenTransfer:
    """A transfer that has not ended. Only the table changes it."""

    command: Transfer
    part_bytes: tuple[int, ...]  # over the link, in order of transfer
    began_s: float = 0.0
    is_demand: bool = field(init=False)  # currently
    num_arrived: int = 0  # parts

    def __post_init__(self) -> None:
        self.is_demand = self.command.is_demand

    @property
    def transfer_id(self) -> TransferId:
        return self.command.transfer_id

    @property
    def direction(self) -> Direction:
        """Direction of the transfer. Adapters are only copied to the device."""
        if isinstance(self.command, AdapterTransfer):
            return Direction.TO_DEVICE
        return self.command.direction

    @property
    def link_key(self) -> LinkKey:
        """Key of its totals."""
        kind = "adapter" if isinstance(self.command, AdapterTransfer) else "kv"
        return LinkKey(self.direction, kind)

    @property
    def is_copying(self) -> bool:
        """Whether a part is ready to be copied."""
        return self.num_arrived < len(self.part_bytes)


@dataclass(slots=True, eq=False, kw_only=True)
class OpenLoad(OpenTransfer):
    """The load of an adapter. Its parts are layer groups."""

    command: AdapterTransfer
    adapter: AdapterFacts
    turn: int = 0  # its place in the order in which loads use the link; meaningless for prefetches
    is_awaited: bool = False  # a step has begun that needs layers of it on the device
    num_read: int = 0  # layer groups that were reported as read from files
    read_s: float = 0.0  # time to read them
    demanded_s: float = math.inf  # since when a request waits, and a layer group is on the host

    @property
    def is_from_files(self) -> bool:
        """Whether its layer groups must be read from files first."""
        host = self.command.host
        return host is not None and not host.is_filled

    @property
    def num_on_host(self) -> int:
        """Layer groups that are on the host. Groups on the device passed through the host."""
        if not self.is_from_files:
            return len(self.part_bytes)
        return max(self.num_read, self.num_arrived)

    @property
    def is_copying(self) -> bool:
        return self.num_arrived < self.num_on_host

    @property
    def is_on_host(self) -> bool:
        """Whether all layer groups are on the host."""
        return self.num_on_host >= len(self.part_bytes)


@dataclass(slots=True, eq=False, kw_only=True)
class OpenCopy(OpenTransfer):
    """A copy of KV blocks."""

    command: KvTransfer
    nodes: tuple[KvNode, ...]  # parallel to the blocks, and held
    num_pinned_blocks: int  # evictable when the copy has ended


class Change(NamedTuple):
    """The last change of a direction's transfers."""

    number: int  # of changes so far
    at_s: float


class ReadingTurn(NamedTuple):
    """The load with files that are presumably being read now."""

    load: OpenLoad
    since_s: float  # when its newest layer group was reported, or its turn began


class TransferTable:
    """Open transfers by id, loads also by adapter, and commands for the next plan.

    Loads that requests wait for use the link one after the other, in the order of their begin until
    ``order_loads`` sets another one. Files are read one adapter after the other, each in the order
    of its layers. Loads that requests wait for come before prefetches. A prefetch is interrupted
    between two layer groups.
    """

    def __init__(self) -> None:
        self.reading: ReadingTurn | None = None
        self.link_use = LinkUse()
        self.changed: set[AdapterId] = set()  # adapters with progress of loads, until taken
        self._open: dict[TransferId, OpenTransfer] = {}  # oldest first
        self._loads: dict[AdapterId, OpenLoad] = {}  # the loads among them
        self._changes = dict.fromkeys(Direction, Change(0, 0.0))
        self._commands: list[Transfer] = []  # not yet in a plan
        self._promoted: list[TransferId] = []  # not yet in a plan
        self._has_new_order = False  # of loads; not yet in a plan
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenTransfer]:
        """Iterate over open transfers, the oldest first."""
        return iter(self._open.values())

    def __contains__(self, transfer_id: object) -> bool:
        return transfer_id in self._open

    def load_of(self, adapter_id: AdapterId) -> OpenLoad | None:
        return self._loads.get(adapter_id)

    @property
    def num_loads(self) -> int:
        """Number of open loads, including those that the next plan begins."""
        return len(self._loads)

    @property
    def num_loads_to_begin(self) -> int:
        """Number of loads that the next plan begins."""
        return sum(isinstance(command, AdapterTransfer) for command in self._commands)

    def last_change(self, direction: Direction) -> Change:
        """Return the last begin, progress, promotion or end of a transfer in this direction."""
        return self._changes[direction]

    def files_in_turn(self) -> list[OpenLoad]:
        """Return loads with files to read in order: the current one, demand loads, prefetches."""
        reading = None if self.reading is None else self.reading.load
        unread = [load for load in self._loads.values() if not load.is_on_host]
        return sorted(unread, key=lambda load: (load is not reading, not load.is_demand))

    def loads_in_turn(self) -> list[OpenLoad]:
        """Return the loads that requests wait for, in the order in which they use the link."""
        demanded = [load for load in self._loads.values() if load.is_demand]
        return sorted(demanded, key=lambda load: load.turn)

    def order_loads(self, loads: Sequence[OpenLoad], now_s: float) -> None:
        """Set the order in which ``loads``, all that requests wait for, use the link."""
        before = self.loads_in_turn()
        if before == loads:
            return
        assert set(before) == set(loads), "another set of loads"
        for turn, load in enumerate(loads):
            load.turn = turn
        self._has_new_order = True
        self._changed(loads[0], now_s)

    def repeat(self, promoted: Sequence[TransferId]) -> None:
        """Send promotions of a plan that was lost, and the order of loads, with the next plan."""
        self._promoted = [one for one in promoted if one in self._open] + self._promoted
        self._has_new_order = True

    def new_id(self) -> TransferId:
        return TransferId(next(self._ids))

    def begin(self, transfer: OpenTransfer, now_s: float) -> None:
        assert transfer.transfer_id not in self._open, transfer
        transfer.began_s = now_s
        self._open[transfer.transfer_id] = transfer
        self._commands.append(transfer.command)
        self._changed(transfer, now_s)
        if isinstance(transfer, OpenLoad):
            adapter_id = transfer.command.adapter_id
            assert adapter_id not in self._loads, f"adapter {adapter_id} is loaded twice"
            self._loads[adapter_id] = transfer
            transfer.turn = self._last_turn()
            self._mark_demanded(transfer, now_s)
            if transfer.is_from_files:
                self._start_next_read(now_s)

    def promote(self, adapter_id: AdapterId, now_s: float) -> None:
        """Promote the prefetch of an adapter to a demand load: a request waits for it now.

        It goes behind the other loads, though some of these may have begun after it.
        """
        load = self._loads.get(adapter_id)
        if load is None or load.is_demand:
            return
        load.turn = self._last_turn()
        self._promote(load, now_s)
        self._mark_demanded(load, now_s)
        self._has_new_order = True
        if load.is_from_files:
            self._start_next_read(now_s)

    def promote_copy(self, copy: OpenCopy, now_s: float) -> None:
        """Promote an open copy of KV: a request waits for it now. Others stay as they are."""
        if not copy.is_demand:
            self._promote(copy, now_s)

    def arrived(self, progress: TransferProgress, now_s: float) -> None:
        """Apply progress on the device. Outdated reports are ignored."""
        transfer = self._open.get(progress.transfer_id)
        if transfer is None or progress.num_groups <= transfer.num_arrived:
            return
        num_before = transfer.num_on_host if isinstance(transfer, OpenLoad) else 0
        new_bytes = sum(transfer.part_bytes[transfer.num_arrived : progress.num_groups])
        transfer.num_arrived = progress.num_groups
        self._changed(transfer, now_s, new_bytes)
        if isinstance(transfer, OpenLoad) and transfer.num_on_host > num_before:
            self._record_progress(transfer, now_s)

    def read(self, progress: TransferRead, now_s: float) -> tuple[int, float]:
        """Apply progress of reading files.

        Returns the newly read bytes and the seconds that they took; zeros for outdated reports and
        ended loads.
        """
        load = self._open.get(progress.transfer_id)
        if load is None:
            return 0, 0.0
        assert isinstance(load, OpenLoad) and load.is_from_files, load
        if progress.num_groups <= load.num_read:
            return 0, 0.0
        num_before = load.num_on_host
        new_bytes = sum(load.part_bytes[load.num_read : progress.num_groups])
        new_s = progress.duration_s - load.read_s
        load.num_read, load.read_s = progress.num_groups, progress.duration_s
        if load.num_on_host > num_before:
            self._use_link(load, now_s)
            self._record_progress(load, now_s)
        return new_bytes, new_s

    def end(self, transfer_id: TransferId, now_s: float, *, has_failed: bool = False) -> OpenTransfer | None:
        """End a transfer and return it; None if it is unknown or has ended."""
        transfer = self._open.pop(transfer_id, None)
        if transfer is None:
            return None
        new_bytes = 0 if has_failed else sum(transfer.part_bytes[transfer.num_arrived :])
        self._changed(transfer, now_s, new_bytes)
        if isinstance(transfer, OpenLoad):
            del self._loads[transfer.command.adapter_id]
            if transfer.is_from_files:
                if self.reading is not None and self.reading.load is transfer:
                    self.reading = None
                self._start_next_read(now_s)
        return transfer

    def take_commands(self) -> tuple[Transfer, ...]:
        """Return the transfers for the next plan."""
        commands, self._commands = tuple(self._commands), []
        return commands

    def take_promoted(self) -> tuple[TransferId, ...]:
        """Return the promoted loads for the next plan."""
        promoted, self._promoted = tuple(self._promoted), []
        return promoted

    def take_order(self) -> tuple[TransferId, ...]:
        """Return the order of loads for the next plan; () = that of the plans before."""
        has_new_order, self._has_new_order = self._has_new_order, False
        return tuple(load.transfer_id for load in self.loads_in_turn()) if has_new_order else ()

    def _promote(self, transfer: OpenTransfer, now_s: float) -> None:
        transfer.is_demand = True
        self._promoted.append(transfer.transfer_id)
        self._changed(transfer, now_s)

    def _mark_demanded(self, load: OpenLoad, now_s: float) -> None:
        """Begin to count how long requests wait for the link, if they do."""
        if load.is_demand and load.num_on_host:
            load.demanded_s = min(load.demanded_s, now_s)

    def _last_turn(self) -> int:
        """Return a turn behind those of all loads."""
        return 1 + max((load.turn for load in self._loads.values()), default=-1)

    def _changed(self, transfer: OpenTransfer, now_s: float, new_bytes: int = 0) -> None:
        direction = transfer.direction
        self._changes[direction] = Change(self._changes[direction].number + 1, now_s)
        self._use_link(transfer, now_s, new_bytes)

    def _use_link(self, transfer: OpenTransfer, now_s: float, new_bytes: int = 0) -> None:
        """Count the use of the link, and mark the adapter of a load as changed."""
        is_busy = transfer.transfer_id in self._open and transfer.is_copying
        if isinstance(transfer, OpenLoad):
            self.changed.add(transfer.command.adapter_id)
        self.link_use.changed(
            transfer.link_key, transfer.transfer_id, now_s, is_busy=is_busy, new_bytes=new_bytes
        )

    def _record_progress(self, load: OpenLoad, now_s: float) -> None:
        """Set the current reading: the load with new layer groups on the host."""
        self._mark_demanded(load, now_s)
        self.reading = ReadingTurn(load, now_s)
        if load.is_on_host:
            self.reading = None
            self._start_next_read(now_s)

    def _start_next_read(self, now_s: float) -> None:
        """Choose the next load to read if none is being read, or if a prefetch is interrupted."""
        unread = self.files_in_turn()
        if not unread:
            return
        first = unread[0]
        if self.reading is None:
            self.reading = ReadingTurn(first, now_s)
        elif not first.is_demand:
            demanded = next((load for load in unread if load.is_demand), None)
            if demanded is not None:
                self.reading = ReadingTurn(demanded, now_s)
