"""What adapters of the hub may take: bytes of each, their number, and bytes in the hub's cache."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..adapters.peft_config import CONFIG_NAME
from ..errors import AdapterError
from ..limits import HubLimits


class HubBudget:
    """An account that all hub resolvers of a server share. Safe to use from several threads."""

    def __init__(self, limits: HubLimits, is_served: Callable[[str], bool]) -> None:
        """``is_served``: whether an adapter of this name is registered."""
        self._limits = limits
        self._is_served = is_served
        self._lock = threading.Lock()
        self._names: set[str] = set()  # of adapters that were fetched; some may be unloaded
        self._fetching: Counter[str] = Counter()
        self._reserved_bytes = 0  # that fetches add to the cache

    def check_size(self, name: str, num_bytes: int) -> None:
        """Raise ``AdapterError`` for an adapter whose files are too large."""
        limit = self._limits.max_adapter_bytes
        if num_bytes > limit:
            raise AdapterError(
                f"adapter {name!r} has {num_bytes} bytes on the hub, at most {limit} are fetched "
                "(--max-hub-adapter-mib)"
            )

    @contextmanager
    def reserved(self, name: str, num_bytes: int, cache: Path) -> Iterator[None]:
        """Inside the block, ``name`` is fetched and adds ``num_bytes`` to the hub's ``cache``.

        Raises ``AdapterError`` if there are too many adapters, or too many bytes in the cache. Both
        are counted again at a limit, so that unloaded and deleted adapters do not count.
        """
        in_cache = bytes_of_adapters(cache) if num_bytes else 0
        with self._lock:
            self._check_number(name)
            self._check_cache(name, num_bytes, in_cache + self._reserved_bytes)
            self._reserved_bytes += num_bytes
            self._fetching[name] += 1
        try:
            yield
            with self._lock:
                self._names.add(name)
        finally:
            with self._lock:
                self._reserved_bytes -= num_bytes
                self._fetching -= Counter((name,))

    def _check_number(self, name: str) -> None:
        limit = self._limits.max_adapters
        if len({name, *self._names, *self._fetching}) > limit:
            self._names = set(filter(self._is_served, self._names))
        if len({name, *self._names, *self._fetching}) > limit:
            raise AdapterError(
                f"adapter {name!r} is not fetched: {limit} adapters of the hub are served, which "
                "is the limit (--max-hub-adapters)"
            )

    def _check_cache(self, name: str, num_bytes: int, num_taken: int) -> None:
        limit = self._limits.max_cache_bytes
        if num_bytes and num_taken + num_bytes > limit:
            raise AdapterError(
                f"adapter {name!r} is not fetched: its {num_bytes} bytes and the {num_taken} of "
                f"other adapters in the hub's cache are more than {limit} (--max-hub-gib)"
            )


def bytes_of_adapters(cache: Path) -> int:
    """Return the bytes of all adapters in the hub's cache, and of unfinished downloads of them."""
    total = 0
    for repository in cache.glob("models--*"):
        if any(repository.glob(f"snapshots/*/{CONFIG_NAME}")):
            total += sum(map(_size, repository.rglob("*")))
    return total


def _size(path: Path) -> int:
    """Return the bytes of a file; snapshots are links to the files in ``blobs``."""
    try:
        return (path.stat() if path.parent.name == "blobs" else path.lstat()).st_size
    except OSError:  # it was deleted meanwhile
        return 0
