"""The names that one engine process serves, their revisions, and changes of these."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import UnknownModelError
from ...server.errors import HttpError
from ..engine_types.corun_api import EngineApi
from ..wire import AdapterEntry, Ensured
from .fetch import Fetcher
from .store import AdapterFileStore

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Name:
    revision: int
    digest: str


class ServedAdapters:
    """The adapters of one process of an engine; a restart begins with none. One event loop."""

    def __init__(
        self,
        engine: EngineApi,
        incarnation: str,
        store: AdapterFileStore,
        fetcher: Fetcher,
        gone: Mapping[str, int],
    ) -> None:
        """``gone``: unloaded names of this agent, and the revisions of their removal."""
        self._engine = engine
        self._incarnation = incarnation
        self._store = store
        self._fetcher = fetcher
        self._gone = gone
        self._names: dict[str, _Name] = {}
        self._former: dict[str, set[str]] = {}  # by digest: names that had this content, and may be draining
        self._locks: dict[str, asyncio.Lock] = {}

    async def ensure(self, entry: AdapterEntry, sources: Sequence[str]) -> Ensured:
        """Have the engine serve ``entry``, or a later revision of it.

        Raises:
            UnknownModelError: The name was unloaded meanwhile.
            HttpError: The files cannot be found, the store is full, or the engine refuses them.
        """
        served = self._names.get(entry.name)
        if served is None or served.revision < entry.revision:
            await self._fetcher.ensure(entry, sources)  # without the lock: a newer revision may arrive
            async with self._lock(entry.name):
                served = await self._load(entry, sources)
        return Ensured(incarnation=self._incarnation, revision=served.revision)

    async def unload(self, name: str, revision: int) -> None:
        """Unload a name, unless the engine serves a later revision."""
        async with self._lock(name):
            served = self._names.get(name)
            if served is not None and served.revision < revision:
                self._leave(name, served)
                await self._engine.unload(name)

    async def pin(self, name: str, *, pinned: bool) -> None:
        async with self._lock(name):
            if name in self._names:
                await self._engine.pin(name, pinned=pinned)

    async def release(self, digest: str) -> bool:
        """Unload all names of a digest unless one is in use; return whether all are unloaded."""
        for name in tuple(self._former.get(digest, ())):
            if await self._is_used(name, by_former=True):
                return False
        self._former.pop(digest, None)
        names = [name for name, served in self._names.items() if served.digest == digest]
        for name in names:
            async with self._lock(name):
                served = self._names.get(name)
                if served is None or served.digest != digest:
                    continue
                if await self._is_used(name):
                    return False
                self._leave(name, served)
                try:
                    await self._engine.unload(name)
                except HttpError as error:
                    _logger.warning("cannot unload %s yet: %s", name, error)
                    return False
                if await self._is_used(name):  # by a request that arrived meanwhile
                    return False
        return True

    def _leave(self, name: str, served: _Name) -> None:
        del self._names[name]
        self._former.setdefault(served.digest, set()).add(name)

    async def _is_used(self, name: str, *, by_former: bool = False) -> bool:
        """Return whether a name is in use; True if the engine does not answer."""
        try:
            return await self._engine.is_used(name, by_former=by_former)
        except HttpError as error:
            _logger.warning("cannot tell whether %s is in use, so it stays: %s", name, error)
            return True

    async def _load(self, entry: AdapterEntry, sources: Sequence[str]) -> _Name:
        served = self._names.get(entry.name)
        if served is not None and served.revision >= entry.revision:
            return served
        if self._gone.get(entry.name, -1) > entry.revision:
            raise UnknownModelError(f"the adapter {entry.name!r} is unloaded", param="model")
        for _ in range(2):  # a damaged copy is fetched again
            async with self._store.in_use(entry.digest) as path:
                if path is not None:
                    await self._load_from(str(path), entry)
                    if served is not None and served.digest != entry.digest:
                        self._leave(entry.name, served)
                    served = self._names[entry.name] = _Name(entry.revision, entry.digest)
                    return served
            await self._fetcher.ensure(entry, sources)
        raise HttpError(
            503,
            f"the files of {entry.name!r} were dropped while they were loaded",
            code="adapter_unavailable",
        )

    async def _load_from(self, path: str, entry: AdapterEntry) -> None:
        try:
            await self._engine.load(entry, path)
        except HttpError as error:
            # Clients know the source directory, not the copy.
            text = str(error).replace(path, entry.source)
            raise HttpError(error.status, text, code=error.code, param=error.param) from None

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())
