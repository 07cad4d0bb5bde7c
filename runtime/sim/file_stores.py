"""Stores of adapters' files by server, in bytes, and the copies between servers. Pure.

As in LoRAServe (section IV-C), a server keeps the files of some adapters. It copies a missing file
from a peer when a request needs it, one file after the other. A file that no server has comes, at
the same speed, from permanent storage.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ..errors import ConfigError


@dataclass(slots=True, eq=False)
class _Store:
    capacity_bytes: int
    free_bytes: int = field(init=False)  # neither used by whole files nor reserved for ordered ones
    files: OrderedDict[str, None] = field(default_factory=OrderedDict)  # least recent use first
    coming: OrderedDict[str, None] = field(default_factory=OrderedDict)  # the first is being copied
    end_s: float = math.inf  # of the current copy
    num_users: Counter[str] = field(default_factory=Counter)
    most_files: int = 0
    largest_bytes: int = 0
    fetched_bytes: int = 0
    planned: Set[str] | None = None  # files that placement wants here; None = there is no plan
    names: frozenset[str] | None = None  # of files; None = not built yet

    def __post_init__(self) -> None:
        self.free_bytes = self.capacity_bytes


@dataclass(frozen=True, slots=True)
class StoreUse:
    """The peak use of a server's store."""

    most_files: int  # at once; with placement, from the first plan on
    largest_bytes: int  # at once, including reserved bytes
    fetched_bytes: int


class FileStores:
    """The stores of all servers, by their indices.

    The least recently used files are evicted, but never the last copy, a file that a request uses,
    or one that is ordered. With placement, unplanned files are evicted as soon as possible. Bytes
    are reserved when a copy is ordered.
    """

    def __init__(self, sizes: Mapping[str, int], capacities: Sequence[int], bytes_per_s: float) -> None:
        """All stores are empty.

        Args:
            sizes: Bytes of each adapter's file.
            capacities: Bytes, by server.
            bytes_per_s: Speed of a copy from a peer.
        """
        self._sizes = sizes
        self._bytes_per_s = bytes_per_s
        self._stores = [_Store(capacity) for capacity in capacities]
        self._num_copies = Counter[str]()
        self._dropped: list[tuple[int, str]] = []

    def put(self, server: int, name: str) -> None:
        """Store a file from the start on; there must be room."""
        self._reserve(self._stores[server], name)
        self._arrived(self._stores[server], name)

    def spread(self, servers: Sequence[int]) -> None:
        """Put every adapter on one of ``servers``, the largest first, where most room is."""
        for name in sorted(self._sizes, key=lambda one: (-self._sizes[one], one)):
            self.put(max(servers, key=lambda one: (self._stores[one].free_bytes, -one)), name)

    def names_on(self, server: int) -> frozenset[str]:
        store = self._stores[server]
        if store.names is None:
            store.names = frozenset(store.files)
        return store.names

    def num_bytes(self, server: int) -> int:
        """Used bytes, including reserved ones."""
        store = self._stores[server]
        return store.capacity_bytes - store.free_bytes

    def num_copies(self, name: str) -> int:
        """Number of servers that have the whole file."""
        return self._num_copies[name]

    def is_there(self, server: int, name: str) -> bool:
        return name in self._stores[server].files

    def can_take(self, server: int, name: str) -> bool:
        """Whether the file is there, is ordered, or could have room."""
        store = self._stores[server]
        return name in store.files or name in store.coming or self._victims(store, name) is not None

    def use(self, server: int, name: str, now_s: float) -> bool:
        """Pin the file for a request until ``release``; return whether it is there.

        A missing file is ordered. ``can_take`` must hold.
        """
        store = self._stores[server]
        store.num_users[name] += 1
        if name in store.files:
            store.files.move_to_end(name)
            return True
        self.fetch(server, name, now_s)
        return False

    def release(self, server: int, name: str) -> None:
        users = self._stores[server].num_users
        assert users[name] > 0, name
        users[name] -= 1
        self._drop_unplanned(server, name)

    def fetch(self, server: int, name: str, now_s: float) -> None:
        """Order a copy, unless the file is there or ordered. ``can_take`` must hold."""
        store = self._stores[server]
        if name in store.files or name in store.coming:
            return
        victims = self._victims(store, name)
        assert victims is not None, "there is no room"
        for victim in victims:
            self._drop(server, victim)
        self._reserve(store, name)
        store.coming[name] = None
        if len(store.coming) == 1:
            self._copy_next(store, now_s)

    def follow(self, server: int, names: Set[str], now_s: float) -> None:
        """Order the planned files as far as there is room, and evict the others.

        Files in use and last copies stay until they are neither.
        """
        store = self._stores[server]
        is_first, store.planned = store.planned is None, names
        for other in list(store.files):
            self._drop_unplanned(server, other)
        if is_first:
            store.most_files = len(store.files)
        for name in sorted(names - store.files.keys()):
            if self.can_take(server, name):
                self.fetch(server, name, now_s)

    def end_s(self, server: int) -> float:
        """When the current copy to the server ends; inf = there is none."""
        return self._stores[server].end_s

    def complete_copy(self, server: int, now_s: float) -> str:
        """Complete the current copy: return its adapter, and start the next."""
        store = self._stores[server]
        name, _ = store.coming.popitem(last=False)
        store.fetched_bytes += self._sizes[name]
        self._arrived(store, name)
        self._copy_next(store, now_s)
        for other in range(len(self._stores)):  # it may have had the last copy until now
            self._drop_unplanned(other, name)
        return name

    def take_dropped(self) -> list[tuple[int, str]]:
        """Return servers and files evicted since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def last_copies(self, server: int) -> list[str]:
        """Files that no other server has."""
        return [name for name in self._stores[server].files if self._num_copies[name] == 1]

    def hand_over(self, server: int, others: Sequence[int], now_s: float) -> None:
        """Copy last copies of a leaving server to those of ``others`` with most room.

        A file that fits on none of them stays, and so does the server.
        """
        for name in self.last_copies(server):
            fitting = [one for one in others if self.can_take(one, name)]
            if not any(name in self._stores[one].coming for one in fitting) and fitting:
                most = max(fitting, key=lambda one: (self._stores[one].free_bytes, -one))
                target = self._stores[most]
                if target.planned is not None:
                    target.planned = target.planned | {name}  # until the next plan
                self.fetch(most, name, now_s)

    def close(self, server: int) -> StoreUse:
        store = self._stores[server]
        used = StoreUse(store.most_files, store.largest_bytes, store.fetched_bytes)
        self._num_copies.subtract(store.files.keys())
        self._stores[server] = _Store(0)
        return used

    def _victims(self, store: _Store, name: str) -> list[str] | None:
        """Files to evict for a new one; None if that is not enough."""
        lack = self._sizes[name] - store.free_bytes
        victims: list[str] = []
        if lack <= 0:
            return victims
        for other in store.files:
            if self._may_go(store, other):
                victims.append(other)
                lack -= self._sizes[other]
                if lack <= 0:
                    return victims
        return None

    def _may_go(self, store: _Store, name: str) -> bool:
        return store.num_users[name] == 0 and self._num_copies[name] > 1

    def _drop_unplanned(self, server: int, name: str) -> None:
        """Evict a file that is not planned, if it is there and not in use."""
        store = self._stores[server]
        if store.planned is None or name in store.planned or name not in store.files:
            return
        if self._may_go(store, name):
            self._drop(server, name)

    def _reserve(self, store: _Store, name: str) -> None:
        store.free_bytes -= self._sizes[name]
        assert store.free_bytes >= 0, f"{name} has no room"
        store.largest_bytes = max(store.largest_bytes, store.capacity_bytes - store.free_bytes)

    def _arrived(self, store: _Store, name: str) -> None:
        store.files[name] = None
        store.names = None
        store.most_files = max(store.most_files, len(store.files))
        self._num_copies[name] += 1

    def _copy_next(self, store: _Store, now_s: float) -> None:
        name = next(iter(store.coming), None)
        store.end_s = math.inf
        if name is not None:
            store.end_s = now_s + self._sizes[name] / self._bytes_per_s

    def _drop(self, server: int, name: str) -> None:
        store = self._stores[server]
        del store.files[name]
        store.names = None
        store.free_bytes += self._sizes[name]
        self._num_copies[name] -= 1
        self._dropped.append((server, name))


def filled_stores(
    sizes: Mapping[str, int],
    num_servers: int,
    there: Sequence[int],
    store_bytes: int | None,
    bytes_per_s: float,
) -> FileStores:
    """Stores of ``store_bytes`` each in their initial state; see ``FileStores``.

    None = each has all files. Otherwise every file is on one of the servers in ``there``. Raises
    ``ConfigError`` if the stores are too small.
    """
    total_bytes, largest_bytes = sum(sizes.values()), max(sizes.values(), default=0)
    if store_bytes is None:
        stores = FileStores(sizes, [total_bytes] * num_servers, bytes_per_s)
        for server in range(num_servers):
            for name in sizes:
                stores.put(server, name)
        return stores
    if largest_bytes > store_bytes:
        raise ConfigError(f"--store-bytes is {store_bytes}: the largest adapter has {largest_bytes} bytes")
    # The largest files are placed first, where most room is: at most one of them may not fit.
    if total_bytes > len(there) * (store_bytes - largest_bytes):
        raise ConfigError(
            f"--store-bytes is {store_bytes}: all adapters have {total_bytes} bytes, which "
            f"{len(there)} servers must keep with room for one of {largest_bytes} more in each"
        )
    stores = FileStores(sizes, [store_bytes] * num_servers, bytes_per_s)
    stores.spread(there)
    return stores
