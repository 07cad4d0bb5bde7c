"""Fetches an adapter's files from another agent, and hashes them on the way.

All functions block; call them in threads. Reading a socket directly into large buffers is several
times faster than the streams of an event loop.
"""

import hashlib
import http.client
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from ..wire import AGENT_FILES_PATH, Manifest, StoredFile, decode
from .files import CHUNK_BYTES, Write, is_wellformed, new_file, write_manifest

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
