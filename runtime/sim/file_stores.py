"""Which server has which adapters' files, in bytes, and how copies come from the others. Pure.

As LoRAServe has it (section IV-C): a server keeps the files of some adapters and takes what it
lacks from a peer when a request for it comes, one after the other. What no server has comes, as
fast, from where adapters are kept for good.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ..errors import ConfigError


@dataclass(slots=True, eq=False)
class _Store:
    """Of one server."""

    capacity_bytes: int
    free_bytes: int = field(init=False)  # beside whole files and those that are to come
    files: OrderedDict[str, None] = field(default_factory=OrderedDict)  # least recent use first
    coming: OrderedDict[str, None] = field(default_factory=OrderedDict)  # the first is under way
    end_s: float = math.inf  # of the copy under way
    num_users: Counter[str] = field(default_factory=Counter)
    most_files: int = 0
    largest_bytes: int = 0
    fetched_bytes: int = 0
    planned: Set[str] | None = None  # files that are to be here; None = nobody has said which
    names: frozenset[str] | None = None  # of files; None = to be made

    def __post_init__(self) -> None:
        self.free_bytes = self.capacity_bytes


@dataclass(frozen=True, slots=True)
class StoreUse:
    """What a server's store came to."""

    most_files: int  # at once; where they are planned, from the first plan on
    largest_bytes: int  # that it held at once, what was to come among it
    fetched_bytes: int


class FileStores:
    """The stores of all servers, by their indices.

    Least recently used files make way, but never the last copy, one that a request uses, or one
    that is to come. Where it is planned which files a server has, others go as soon as they may.
    Bytes are reserved when a copy is ordered.
    """

    def __init__(
        self, sizes: Mapping[str, int], capacities: Sequence[int], bytes_per_s: float
    ) -> None:
        """Nothing is kept yet.

        Args:
            sizes: Bytes of all adapters' files.
            capacities: Bytes, by server.
            bytes_per_s: Of a copy from a peer.
        """
        self._sizes = sizes
        self._bytes_per_s = bytes_per_s
        self._stores = [_Store(capacity) for capacity in capacities]
        self._num_copies = Counter[str]()
        self._dropped: list[tuple[int, str]] = []

    def put(self, server: int, name: str) -> None:
        """It is there from the beginning on; there must be room."""
        self._reserve(self._stores[server], name)
        self._arrived(self._stores[server], name)

    def spread(self, servers: Sequence[int]) -> None:
        """Put every adapter on one of ``servers``: the largest first, to where most room is."""
        for name in sorted(self._sizes, key=lambda one: (-self._sizes[one], one)):
            self.put(max(servers, key=lambda one: (self._stores[one].free_bytes, -one)), name)

    def names_on(self, server: int) -> frozenset[str]:
        """Files that are there as a whole."""
        store = self._stores[server]
        if store.names is None:
            store.names = frozenset(store.files)
        return store.names

    def num_bytes(self, server: int) -> int:
        """That are taken, what is to come among them."""
        store = self._stores[server]
        return store.capacity_bytes - store.free_bytes

    def num_copies(self, name: str) -> int:
        """Servers that have it as a whole."""
        return self._num_copies[name]

    def is_there(self, server: int, name: str) -> bool:
        """Whether the file is there as a whole."""
        return name in self._stores[server].files

    def can_take(self, server: int, name: str) -> bool:
        """Whether the file is there, is to come, or could have room."""
        store = self._stores[server]
        return name in store.files or name in store.coming or self._victims(store, name) is not None

    def use(self, server: int, name: str, now_s: float) -> bool:
        """A request needs the file until ``release``; say whether it is there.

        Else it is ordered, if it was not. ``can_take`` must hold.
        """
        store = self._stores[server]
        store.num_users[name] += 1
        if name in store.files:
            store.files.move_to_end(name)
            return True
        self.fetch(server, name, now_s)
        return False

    def release(self, server: int, name: str) -> None:
        """A request that used it has ended."""
        users = self._stores[server].num_users
        assert users[name] > 0, name
        users[name] -= 1
        self._drop_unplanned(server, name)

    def fetch(self, server: int, name: str, now_s: float) -> None:
        """Order a copy, unless it is there or was ordered. ``can_take`` must hold."""
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
        """Order what it is to have, as far as there is room, and let go of what it is not to.

        What is in use and last copies stay, until they are neither.
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
        """When the copy under way to it ends; inf = there is none."""
        return self._stores[server].end_s

    def settle(self, server: int, now_s: float) -> str:
        """Its copy under way has ended: return whose files it was, and begin the next."""
        store = self._stores[server]
        name, _ = store.coming.popitem(last=False)
        store.fetched_bytes += self._sizes[name]
        self._arrived(store, name)
        self._copy_next(store, now_s)
        for other in range(len(self._stores)):  # which may have been the last copy until now
            self._drop_unplanned(other, name)
        return name

    def take_dropped(self) -> list[tuple[int, str]]:
        """Return what made way since the last call, and where."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def last_copies(self, server: int) -> list[str]:
        """What only this server has."""
        return [name for name in self._stores[server].files if self._num_copies[name] == 1]

    def hand_over(self, server: int, others: Sequence[int], now_s: float) -> None:
        """Have last copies of a server that leaves made on others, where most room is.

        What has room nowhere stays, and so does the server.
        """
        for name in self.last_copies(server):
            fitting = [one for one in others if self.can_take(one, name)]
            if not any(name in self._stores[one].coming for one in fitting) and fitting:
                most = max(fitting, key=lambda one: (self._stores[one].free_bytes, -one))
                target = self._stores[most]
                if target.planned is not None:
                    target.planned = target.planned | {name}  # until the next plan says where
                self.fetch(most, name, now_s)

    def close(self, server: int) -> StoreUse:
        """The server is gone, with all that it had."""
        store = self._stores[server]
        used = StoreUse(store.most_files, store.largest_bytes, store.fetched_bytes)
        self._num_copies.subtract(store.files.keys())
        self._stores[server] = _Store(0)
        return used

    def _victims(self, store: _Store, name: str) -> list[str] | None:
        """What must make way for a file, or None if that is not enough."""
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
        """Let go of a file that the server is not to have, if it has it and may."""
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
    sizes: Mapping[str, int], num_servers: int, there: Sequence[int], store_bytes: int | None,
    bytes_per_s: float,
) -> FileStores:  # fmt: skip
    """Stores of ``store_bytes`` each as they are at the beginning; see ``FileStores``.

    None = each has all files. Else every file is on one of the servers that are ``there``. Raises
    ``ConfigError`` if they are too small.
    """
    total_bytes, largest_bytes = sum(sizes.values()), max(sizes.values(), default=0)
    if store_bytes is None:
        stores = FileStores(sizes, [total_bytes] * num_servers, bytes_per_s)
        for server in range(num_servers):
            for name in sizes:
                stores.put(server, name)
        return stores
    if largest_bytes > store_bytes:
        raise ConfigError(
            f"--store-bytes is {store_bytes}: the largest adapter has {largest_bytes} bytes"
        )
    # The largest go first to where most room is: no more than one of them lacks room in the end.
    if total_bytes > len(there) * (store_bytes - largest_bytes):
        raise ConfigError(
            f"--store-bytes is {store_bytes}: all adapters have {total_bytes} bytes, which "
            f"{len(there)} servers must keep with room for one of {largest_bytes} more in each"
        )
    stores = FileStores(sizes, [store_bytes] * num_servers, bytes_per_s)
    stores.spread(there)
    return stores
