"""Makes adapter files available locally: from this store, a peer, or the source.

There is one fetch per digest, for all requests that wait for it. Transfers block, so threads call
them: reading a socket directly into large buffers is several times faster than the streams of an
event loop.
"""

import asyncio
import hashlib
import http.client
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from ...errors import AdapterError
from ...server.errors import HttpError
from ...tasks import cancel_all
from ..wire import AGENT_FILES_PATH, AdapterEntry, Manifest, PeerFetches, StoredFile, decode
from .files import CHUNK_BYTES, Write, is_wellformed, new_file, write_manifest
from .store import AdapterFileStore, Release, check_digest

SILENT_S = 2.0  # without a byte for so long, the peer is lost
_MAX_MANIFEST_BYTES = 1 << 20


class PeerError(Exception):
    """A peer is dead or silent, or does not have the files."""


class WrongContentError(PeerError):
    """A peer sent content that does not match the digest."""


class PeerFiles:
    """A connection to one agent, for one adapter. A context manager."""

    def __init__(self, url: str, key: str, digest: str) -> None:
        self._where = urlsplit(url)
        self._key = key
        self._digest = digest
        self._connection = http.client.HTTPConnection(
            self._where.hostname or "", self._where.port, timeout=SILENT_S
        )

    def __enter__(self) -> "PeerFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def manifest(self) -> Manifest:
        """Return the adapter's manifest. Raises ``PeerError``."""
        response = self._get("")
        try:
            body = response.read(_MAX_MANIFEST_BYTES)
            manifest = decode(body, Manifest)
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise self._lost(error) from None
        if manifest.digest != self._digest or not is_wellformed(manifest):
            raise WrongContentError(f"{self._where.netloc} lists other files than were asked for")
        return manifest

    def copy(self, manifest: Manifest, directory: Path, same_files: Mapping[str, Path]) -> int:
        """Copy all files into the empty ``directory``, and check them against ``manifest``.

        ``same_files``: stored files with the right content, by name, which are linked instead.
        Returns the number of received bytes. Raises ``PeerError`` or ``StoreFullError``.
        """
        num_bytes = 0
        with ThreadPoolExecutor(1, thread_name_prefix="corun-hash") as hasher:
            for file in manifest.files:
                if _link(same_files.get(file.name), directory / file.name):
                    continue
                with new_file(directory / file.name) as write:
                    sha256 = self._copy(file, write, hasher)
                if sha256 != file.sha256:
                    raise WrongContentError(f"{self._where.netloc} sent a wrong {file.name}")
                num_bytes += file.num_bytes
        write_manifest(directory, list(manifest.files))
        return num_bytes

    def _copy(self, file: StoredFile, write: Write, hasher: ThreadPoolExecutor) -> str:
        """Receive a file into one buffer while the other one is hashed; return its SHA-256."""
        response = self._get(f"/{quote(file.name)}")
        sha256 = hashlib.sha256()
        buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]
        hashing: Future[None] | None = None
        num_bytes = index = 0
        while num_bytes < file.num_bytes:
            buffer = buffers[index]
            num_read = self._fill(response, buffer[: file.num_bytes - num_bytes])
            if hashing is not None:
                hashing.result()
            hashing = hasher.submit(sha256.update, buffer[:num_read])
            write(buffer[:num_read])
            num_bytes += num_read
            index = 1 - index
        if hashing is not None:
            hashing.result()
        if response.read(1):
            raise WrongContentError(f"{self._where.netloc} sent more bytes than {file.name} has")
        return sha256.hexdigest()

    def _fill(self, response: http.client.HTTPResponse, buffer: memoryview) -> int:
        """Read until ``buffer`` is full; each read waits at most ``SILENT_S``."""
        num_bytes = 0
        while num_bytes < len(buffer):
            try:
                num_read = response.readinto(buffer[num_bytes:])
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None
            if num_read == 0:
                raise PeerError(f"{self._where.netloc} closed the connection in the middle of a file")
            num_bytes += num_read
        return num_bytes

    def _get(self, path: str) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._key}"}
        try:
            self._connection.request("GET", f"{AGENT_FILES_PATH}/{self._digest}{path}", headers=headers)
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        if response.status != http.client.OK:
            raise PeerError(f"{self._where.netloc} answers {response.status}")
        return response

    def _lost(self, error: Exception) -> PeerError:
        text = str(error) or type(error).__name__
        return PeerError(f"{self._where.netloc} is lost: {text}")


def _link(source: Path | None, target: Path) -> bool:
    """Link ``target`` to ``source``; return False without a source or if linking fails."""
    try:
        if source is not None:
            os.link(source, target)
    except OSError:
        return False
    return source is not None


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
