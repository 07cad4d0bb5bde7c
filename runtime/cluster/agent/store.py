"""The store of adapter files on this machine, by digest, for its engines and for other agents.

A directory ``DIR/adapters/DIGEST`` is complete and never changes. Incomplete ones are in
``DIR/incoming``, which is emptied at start. Belongs to one event loop; threads access files.
"""

import asyncio
import fcntl
import itertools
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TypeVar

from ...adapters.folder_files import OWN_FILES, AdapterRoots
from ...errors import AdapterError, ConfigError
from ...file_calls import FILES
from ...server.errors import InvalidValueError
from ..wire import Manifest
from .files import MANIFEST_NAME, StoreFullError, copy_adapter, holds, num_bytes_of, rank_of, read_manifest

_DIGEST = re.compile(r"[0-9a-f]{64}")
# A new copy is not dropped as unneeded for so long: the name that it gets may still be missing.
_GRACE_S = 60.0
# A copy fetched for a request is not dropped as a stray before the request arrives, too. It is also
# the shortest interval at which engines are asked whether they use a copy.
_STRAY_GRACE_S = 5.0
_GIB = 2**30
_MAX_READS = 8  # of sources, at a time

Result = TypeVar("Result")

# Unloads a digest's adapters from engines; returns False if one is in use.
Release = Callable[[str], Awaitable[bool]]

_logger = logging.getLogger(__name__)


def check_digest(text: str) -> str:
    """Return ``text`` if it is a digest; raise ``HttpError`` if it is anything else."""
    if _DIGEST.fullmatch(text) is None:
        shown = text if len(text) <= 100 else text[:100] + "…"
        raise InvalidValueError(f"{shown!r} is no digest of an adapter")
    return text


class _Copy:
    """A complete adapter."""

    __slots__ = ("asked_s", "is_verified", "manifest", "num_bytes", "num_holds", "used_s")

    def __init__(self, manifest: Manifest, used_s: float, *, is_verified: bool) -> None:
        self.manifest = manifest
        self.num_bytes = sum(one.num_bytes for one in manifest.files)
        self.used_s = used_s
        self.asked_s = used_s  # time of the last query whether engines use it
        self.is_verified = is_verified  # by this process
        self.num_holds = 0  # loads that are about to begin


class AdapterFileStore:
    """The copies and their last use. The one unused longest is dropped when room is needed."""

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        roots: AdapterRoots = OWN_FILES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open ``directory``, which is created if it is missing.

        ``roots``: where links in sources may lead. Raises ``ConfigError`` if it cannot be written,
        or another running agent uses it.
        """
        self.capacity_bytes = capacity_bytes
        # Digests that may be dropped: the controller has released them since they arrived.
        self.released: Set[str] = frozenset()
        self._clock = clock
        self._roots = roots
        self._reading = asyncio.Semaphore(_MAX_READS)
        self._adapters, self._incoming = directory / "adapters", directory / "incoming"
        self._lock_file = _lock_directory(directory)
        shutil.rmtree(self._incoming, ignore_errors=True)
        for path in (self._adapters, self._incoming):
            path.mkdir(exist_ok=True)
        self._copies = {copy.manifest.digest: copy for copy in self._found()}
        self._coming_bytes = 0
        self._numbers = itertools.count()
        self._making_room = asyncio.Lock()
        self._verifying: dict[str, asyncio.Lock] = {}

    def close(self) -> None:
        """Release the directory. Idempotent."""
        self._lock_file.close()

    @property
    def used_bytes(self) -> int:
        """The size of all copies, incoming ones included."""
        return self._coming_bytes + sum(copy.num_bytes for copy in self._copies.values())

    def ages_s(self) -> dict[str, float]:
        """Return seconds since the last use, by digest."""
        now_s = self._clock()
        return {digest: now_s - copy.used_s for digest, copy in self._copies.items()}

    def kept(self) -> frozenset[str]:
        """Return digests that must not be dropped."""
        return frozenset(self._copies.keys() - self.released)

    def manifest(self, digest: str) -> Manifest | None:
        """Return a copy's manifest; None if there is no copy."""
        copy = self._copies.get(digest)
        return None if copy is None else copy.manifest

    def same_files(self, manifest: Manifest) -> Mapping[str, Path]:
        """Return paths of stored files with the same content, by their names in ``manifest``.

        An adapter with a new chat template has another digest but the same weights.
        """
        here = {
            file.sha256: self.path(digest) / file.name
            for digest, copy in self._copies.items()
            if copy.is_verified
            for file in copy.manifest.files
        }
        return {one.name: here[one.sha256] for one in manifest.files if one.sha256 in here}

    def path(self, digest: str) -> Path:
        """Return the directory of a digest's files."""
        return self._adapters / check_digest(digest)

    @asynccontextmanager
    async def in_use(self, digest: str) -> AsyncIterator[Path | None]:
        """Keep a copy inside the block; yield its path, or None. Verifies it once per process."""
        copy = self._copies.get(digest)
        if copy is None:
            yield None
            return
        copy.num_holds += 1
        try:
            yield self.path(digest) if await self._is_right(digest, copy) else None
        finally:
            copy.num_holds -= 1
            self._use(digest, copy)

    async def ingest(
        self, source: Path, release: Release, *, expected: str | None = None
    ) -> tuple[Manifest, int]:
        """Copy a PEFT directory into the store; return its manifest and rank.

        Raises:
            AdapterError: It cannot be served, changes while it is read, or is not ``expected``.
            StoreFullError: The store has no room.
        """
        # So that errors name the user's directory.
        await self._read(source, lambda _: rank_of(source, self._roots))
        num_bytes = await self._read(source, lambda _: num_bytes_of(source))
        async with self.incoming(num_bytes, release) as directory:
            manifest = await self._read(source, lambda _: copy_adapter(source, directory, self._roots))
            try:
                rank = await asyncio.to_thread(rank_of, directory)
            except AdapterError:
                raise AdapterError(f"{source} changed while it was read; load it again") from None
            if expected not in (None, manifest.digest):
                raise AdapterError(f"{source} has changed since it was loaded")
            self.adopt(directory, manifest)
        return manifest, rank

    async def _read(self, source: Path, work: Callable[[object], Result]) -> Result:
        """Read a source in a thread of its own: its file system may not answer."""
        async with self._reading:
            try:
                return await FILES.answer(work, str(source), has_deadline=False)
            except OSError as error:
                raise AdapterError(f"cannot read {source}: {error.strerror or error}") from error

    @asynccontextmanager
    async def incoming(self, num_bytes: int, release: Release) -> AsyncIterator[Path]:
        """Make room for ``num_bytes``; yield an empty directory, which is deleted unless adopted.

        Raises ``StoreFullError``.
        """
        async with self._making_room:
            await self._make_room(num_bytes, release)
            self._coming_bytes += num_bytes
        directory = None
        try:
            directory = Path(await asyncio.to_thread(_new_directory, self._incoming))
            yield directory
        finally:
            self._coming_bytes -= num_bytes
            if directory is not None:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def adopt(self, directory: Path, manifest: Manifest) -> None:
        """Turn an incoming directory, with checked content, into a copy."""
        digest = manifest.digest
        if digest not in self._copies:
            target = self.path(digest)
            shutil.rmtree(target, ignore_errors=True)  # a leftover that was not recognized at start
            try:
                directory.rename(target)
            except OSError as error:
                raise StoreFullError(f"cannot write {target}: {error.strerror}") from None
            self._copies[digest] = _Copy(manifest, self._clock(), is_verified=True)
        self._use(digest, self._copies[digest])

    async def drop_unneeded(self, digests: Collection[str], release: Release) -> None:
        """Drop copies without a name, unless they are in use or new."""
        now_s = self._clock()
        for digest in digests:
            copy = self._copies.get(digest)
            if copy is not None and now_s - copy.used_s > _GRACE_S:
                await self._drop(digest, release)

    async def drop_strays(self, digests: Collection[str], release: Release) -> None:
        """Drop copies that are placed at other agents only, once they are not in use."""
        for digest in digests:
            copy, now_s = self._copies.get(digest), self._clock()
            if copy is not None and now_s - max(copy.used_s, copy.asked_s) > _STRAY_GRACE_S:
                copy.asked_s = now_s
                await self._drop(digest, release)

    def _use(self, digest: str, copy: _Copy) -> None:
        copy.used_s = self._clock()
        try:
            os.utime(self.path(digest) / MANIFEST_NAME)  # for the next start
        except OSError:
            _logger.warning("cannot store the time of the last use of %s", digest)

    async def _is_right(self, digest: str, copy: _Copy) -> bool:
        """Return whether a copy is unchanged; a changed one is dropped."""
        async with self._verifying.setdefault(digest, asyncio.Lock()):
            if not copy.is_verified:
                path = self.path(digest)
                copy.is_verified = await asyncio.to_thread(holds, path, copy.manifest)
        if not copy.is_verified and self._copies.pop(digest, None) is not None:
            _logger.error("%s: the files have changed; the copy is dropped", self.path(digest))
            await self._remove(digest)
        return copy.is_verified

    async def _make_room(self, num_bytes: int, release: Release) -> None:
        if num_bytes > self.capacity_bytes:
            raise self._full(num_bytes)
        oldest = sorted(self._copies, key=lambda digest: self._copies[digest].used_s)
        for digest in oldest:
            if self.used_bytes + num_bytes <= self.capacity_bytes:
                return
            if digest in self.released:
                await self._drop(digest, release)
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise self._full(num_bytes)

    async def _drop(self, digest: str, release: Release) -> None:
        copy = self._copies.get(digest)
        if copy is None or copy.num_holds or not await release(digest):
            return
        is_free = not copy.num_holds and digest in self.released  # both may have changed meanwhile
        if is_free and self._copies.pop(digest, None) is not None:
            self._verifying.pop(digest, None)
            self.released -= {digest}  # a later copy is not released
            await self._remove(digest)

    async def _remove(self, digest: str) -> None:
        """Delete a copy. It is renamed first, since the digest may arrive again meanwhile."""
        away = self._incoming / f"gone-{next(self._numbers)}"
        try:
            self.path(digest).rename(away)
        except OSError as error:
            _logger.warning("cannot remove %s: %s", self.path(digest), error.strerror)
            return
        await asyncio.to_thread(shutil.rmtree, away, ignore_errors=True)

    def _full(self, num_bytes: int) -> StoreFullError:
        kept = sum(digest not in self.released for digest in self._copies)
        return StoreFullError(
            f"an adapter of {num_bytes / _GIB:.3g} GiB does not fit: {self.used_bytes / _GIB:.3g} "
            f"of {self.capacity_bytes / _GIB:.3g} GiB (--adapter-cache-gib) are taken, {kept} of "
            f"{len(self._copies)} adapters must stay, and the others are in use"
        )

    def _found(self) -> list[_Copy]:
        """Return copies of an earlier process; incomplete ones are removed."""
        found = []
        now_s, wall_s = self._clock(), time.time()
        for path in self._adapters.iterdir():
            manifest = read_manifest(path)
            if manifest is None:
                _logger.warning("%s is not a complete adapter; removing it", path)
                shutil.rmtree(path, ignore_errors=True)
                continue
            age_s = max(0.0, wall_s - (path / MANIFEST_NAME).stat().st_mtime)
            found.append(_Copy(manifest, now_s - age_s, is_verified=False))
        return found


def _new_directory(parent: Path) -> str:
    try:
        return tempfile.mkdtemp(dir=parent)
    except OSError as error:
        raise StoreFullError(f"cannot write {parent} (--state-dir): {error.strerror}") from None


def _lock_directory(directory: Path) -> IO[bytes]:
    """Lock ``directory`` for this process; return the lock file."""
    file = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "agent.lock").open("wb")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if file is not None:
            file.close()
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"--state-dir {directory} is held by another agent") from None
        raise ConfigError(f"--state-dir {directory}: {error.strerror}") from None
    return file
