"""Makes adapter files available locally: from this store, a peer, or the source.

There is one fetch per digest, for all requests that wait for it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...errors import AdapterError
from ...server.errors import HttpError
from ...tasks import cancel_all
from ..wire import AdapterEntry, PeerFetches
from .store import AdapterFileStore, Release, check_digest
from .transfer import PeerError, PeerFiles, WrongContentError

SOURCE = "source"  # counted as a peer: the directory of the adapter

_logger = logging.getLogger(__name__)


class Fetcher:
    """Fetches files, and counts them by origin. Belongs to one event loop."""

    def __init__(self, store: AdapterFileStore, cluster_key: str, release: Release) -> None:
        self.by_peer: dict[str, PeerFetches] = {}  # and ``SOURCE``
        self._store = store
        self._key = cluster_key
        self._release = release
        self._running: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, entry: AdapterEntry, sources: Sequence[str]) -> None:
        """Return when the store has ``entry``; ``sources``: URLs of peers, best first.

        A cancelled caller does not cancel the fetch.

        Raises:
            HttpError: Neither a peer nor the source has the files.
            StoreFullError: The store has no room.
        """
        digest = check_digest(entry.digest)
        if self._store.manifest(digest) is not None:
            return
        task = self._running.get(digest)
        if task is None:
            task = asyncio.ensure_future(self._fetch(entry, sources))
            self._running[digest] = task
            task.add_done_callback(lambda task: self._ended(digest, task))
        await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel all fetches; their threads end when the peer has sent nothing for a while."""
        await cancel_all(*self._running.values())

    def _ended(self, digest: str, task: "asyncio.Task[None]") -> None:
        del self._running[digest]
        if not task.cancelled():
            task.exception()  # mark it as retrieved: all callers may have left

    async def _fetch(self, entry: AdapterEntry, sources: Sequence[str]) -> None:
        reasons = []
        for peer in sources:
            started_s = time.monotonic()
            try:
                num_bytes = await self._from_peer(peer, entry.digest)
            except PeerError as error:
                is_wrong = isinstance(error, WrongContentError)
                self._count(peer, num_wrong=int(is_wrong), num_lost=int(not is_wrong))
                _logger.warning("cannot fetch adapter %s from a peer: %s", entry.name, error)
                reasons.append(str(error))
            else:
                self._count_fetched(peer, num_bytes, started_s)
                return
        started_s = time.monotonic()
        try:
            manifest, _ = await self._store.ingest(Path(entry.source), self._release, expected=entry.digest)
        except AdapterError as error:
            reasons.append(str(error))
        else:
            num_bytes = sum(one.num_bytes for one in manifest.files)
            self._count_fetched(SOURCE, num_bytes, started_s)
            return
        self._count(SOURCE, num_lost=1)
        raise HttpError(
            503,
            f"no source has the files of {entry.name!r}: {'; '.join(reasons)}",
            code="adapter_unavailable",
        )

    async def _from_peer(self, peer: str, digest: str) -> int:
        """Fetch an adapter; return the number of bytes from the peer."""
        with PeerFiles(peer, self._key, digest) as files:
            manifest = await asyncio.to_thread(files.manifest)
            num_bytes = sum(one.num_bytes for one in manifest.files)
            async with self._store.incoming(num_bytes, self._release) as directory:
                same_files = self._store.same_files(manifest)
                num_received = await asyncio.to_thread(files.copy, manifest, directory, same_files)
                self._store.adopt(directory, manifest)
        return num_received

    def _count_fetched(self, peer: str, num_bytes: int, started_s: float) -> None:
        seconds = time.monotonic() - started_s
        self._count(peer, num_fetched=1, num_bytes=num_bytes, seconds=seconds)

    def _count(self, peer: str, **more: float) -> None:
        known = self.by_peer.get(peer, PeerFetches())
        sums = {name: getattr(known, name) + value for name, value in more.items()}
        self.by_peer[peer] = msgspec.structs.replace(known, **sums)
