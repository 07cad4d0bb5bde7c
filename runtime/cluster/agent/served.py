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
    """Of one process of an engine: its next one begins with none. On one event loop."""

    def __init__(
        self, engine: EngineApi, incarnation: str, store: AdapterFileStore, fetcher: Fetcher,
        gone: Mapping[str, int],
    ) -> None:  # fmt: skip
        """``gone``: names of this agent that are unloaded, and from which revision on."""
        self._engine = engine
        self._incarnation = incarnation
        self._store = store
        self._fetcher = fetcher
        self._gone = gone
        self._names: dict[str, _Name] = {}
        self._former: dict[str, set[str]] = {}  # by digest: names that were that, and may drain
        self._locks: dict[str, asyncio.Lock] = {}

    async def ensure(self, entry: AdapterEntry, sources: Sequence[str]) -> Ensured:
        """Have the engine serve ``entry``; at a later revision, if it is asked for one.

        Raises:
            UnknownModelError: The name is unloaded since.
            HttpError: The files are nowhere, or there is no room, or the engine refuses them.
        """
        served = self._names.get(entry.name)
        if served is None or served.revision < entry.revision:
            await self._fetcher.ensure(entry, sources)  # not under the lock: a newer one may come
            async with self._lock(entry.name):
                served = await self._load(entry, sources)
        return Ensured(incarnation=self._incarnation, revision=served.revision)

    async def unload(self, name: str, revision: int) -> None:
        """Have the engine drop a name, unless it serves a later revision."""
        async with self._lock(name):
            served = self._names.get(name)
            if served is not None and served.revision < revision:
                self._leave(name, served)
                await self._engine.unload(name)

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Pin a name, if it is served here."""
        async with self._lock(name):
            if name in self._names:
                await self._engine.pin(name, pinned=pinned)

    async def release(self, digest: str) -> bool:
        """Drop all names of this content, if none is used; return whether it is free then."""
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
                if await self._is_used(name):  # by one that came in between
                    return False
        return True

    def _leave(self, name: str, served: _Name) -> None:
        del self._names[name]
        self._former.setdefault(served.digest, set()).add(name)

    async def _is_used(self, name: str, *, by_former: bool = False) -> bool:
        """Whether it is in use; True if the engine does not answer."""
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
        for _ in range(2):  # a copy that turns out to be damaged is fetched again
            async with self._store.in_use(entry.digest) as path:
                if path is not None:
                    await self._load_from(str(path), entry)
                    if served is not None and served.digest != entry.digest:
                        self._leave(entry.name, served)
                    served = self._names[entry.name] = _Name(entry.revision, entry.digest)
                    return served
            await self._fetcher.ensure(entry, sources)
        raise HttpError(
            503, f"the files of {entry.name!r} were here and are gone", code="adapter_unavailable"
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
