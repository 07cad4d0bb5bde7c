"""A disk cache of packed matrices, so that later starts read what the first one has made.

One file holds all matrices of a model; its name states what they were made from. It is written
completely or not at all, beside the running engine of the first process; each array is read with its
digest. It is read, not mapped: so its pages are huge, and later changes of the file do not affect the
engine.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...cpu_workers.affinity import limit_torch_threads, place_thread
from ...runtime.kept_records import mark_as_used
from ...runtime.whole_file import replacing
from ..device import huge_pages

_LOG = logging.getLogger(__name__)

_LENGTH_BYTES = 8  # length of the index, little-endian, in front of it
_MAX_INDEX_BYTES = 64 << 20
_ALIGNMENT = 64
_SUFFIX, _NOTE_SUFFIX = ".weights", ".digest"
# Share of the file system's capacity for all files together; the least recently used are removed.
_MAX_SHARE = 1 / 2
_MAX_AGE_S = 90 * 86400.0
_UNFINISHED_AGE_S = 3600.0  # since the last change of a file that a killed process was writing
_PIECE_BYTES = 1 << 20  # are digested and written at a time
_REST = 9.0  # of a writer while requests run: 10 % of the time are its own
_CLOSE_S = 2.0  # for the rest of the file; the front end waits 5 s before it kills the engine

Arrays = Mapping[str, np.ndarray]


class KeptWeights:
    """The cached matrices of one model; may be empty."""

    def __init__(self, directory: Path, key: str, num_threads: int = 1) -> None:
        """Begin to read all of them, with ``num_threads``.

        ``key``: names content and packing, as part of a file's name.
        """
        self._path = directory / f"{key}{_SUFFIX}"
        self._index: dict[str, Any] = {}
        self._ahead: dict[str, Future[dict[str, np.ndarray]]] = {}
        # Copies, digests and new pages take as long as reading, and one thread waits for all.
        self._threads = ThreadPoolExecutor(num_threads, "corun-kept-weights", initializer=limit_torch_threads)
        try:
            self._file = self._path.open("rb", buffering=0)
        except OSError:
            return
        try:
            length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
            text = self._file.read(length) if length <= _MAX_INDEX_BYTES else b""
            index = json.loads(text)
            if not isinstance(index, dict):
                raise ValueError("it has no valid index")
            self._index = index
            self._start = _aligned(_LENGTH_BYTES + length)
            self._ahead = {name: self._threads.submit(self._read_all, one) for name, one in index.items()}
        except (OSError, ValueError) as error:
            self._damaged(str(error))
        mark_as_used(self._path)

    def __len__(self) -> int:
        """The number of cached matrices."""
        return len(self._index)

    def read(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays of a matrix, in their own memory; None if missing, damaged or read before."""
        found = self._ahead.pop(name, None)
        if found is None:
            return None
        try:
            return found.result()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._damaged(f"{name}: {error}")
            return None

    def close(self) -> None:
        """Stop reading, and close the file, if there is one. Idempotent."""
        self._ahead.clear()
        self._threads.shutdown(cancel_futures=True)
        if hasattr(self, "_file"):
            self._file.close()

    def write(
        self, matrices: Mapping[str, Arrays], after_piece: Callable[[float], None] = lambda _s: None
    ) -> None:
        """Replace the cached matrices by ``matrices``, and close; a failure is logged.

        ``after_piece`` is called with the seconds that each piece took. If it raises, nothing changes.
        """
        self.close()
        num_bytes = sum(array.nbytes for arrays in matrices.values() for array in arrays.values())
        directory = self._path.parent
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._make_room(num_bytes)
            with replacing(self._path) as file:
                _write(file, matrices, after_piece)
        except OSError as error:
            _LOG.warning(
                "packed weights are not kept for the next start: %s: %s", directory, error.strerror or error
            )
        else:
            _LOG.info("packed weights are kept in %s (%d bytes)", self._path, num_bytes)

    def _read_all(self, entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {array: self._read(fields) for array, fields in entry.items()}

    def _read(self, fields: Mapping[str, Any]) -> np.ndarray:
        dtype, shape = np.dtype(str(fields["dtype"])), tuple(map(int, fields["shape"]))
        num_bytes, position = math.prod(shape) * dtype.itemsize, self._start + int(fields["start"])
        if position + num_bytes > os.fstat(self._file.fileno()).st_size:
            raise ValueError("it is too short")
        memory = huge_pages.zeros(num_bytes).numpy()
        view = memory.data
        done = 0
        while done < len(view):
            num = os.preadv(self._file.fileno(), [view[done:]], position + done)
            if num == 0:
                raise ValueError("it was truncated")
            done += num
        if hashlib.sha256(view).hexdigest() != fields["sha256"]:
            raise ValueError("its digest differs")
        return memory.view(dtype).reshape(shape)

    def _damaged(self, reason: str) -> None:
        _LOG.warning("%s is damaged and will be made again: %s", self._path, reason)
        self._index = {}
        self.close()

    def _make_room(self, num_bytes: int) -> None:
        """Remove files that were not used for long, and the least recently used above the limit."""
        directory = self._path.parent
        files = [(path.stat(), path) for path in directory.iterdir() if path != self._path]
        kept_bytes = num_bytes
        free_bytes = shutil.disk_usage(directory).free
        limit = (free_bytes + sum(stat.st_size for stat, _ in files)) * _MAX_SHARE
        if num_bytes > limit:
            raise OSError(f"{num_bytes} bytes are more than half of the limit")
        for stat, path in sorted(files, key=lambda one: -one[0].st_mtime):
            kept_bytes += stat.st_size
            is_finished = path.suffix in (_SUFFIX, _NOTE_SUFFIX)
            max_age_s = _MAX_AGE_S if is_finished else _UNFINISHED_AGE_S
            if kept_bytes > limit or stat.st_mtime < time.time() - max_age_s:
                path.unlink(missing_ok=True)


class LateWeights:
    """Matrices to be written for the next start: by a thread beside an engine, or at once."""

    def __init__(self, kept: KeptWeights, matrices: Mapping[str, Arrays]) -> None:
        """``kept``: closed, to be replaced by ``matrices``, which do not change any more."""
        self._kept = kept
        self._matrices = matrices
        self._is_closing = threading.Event()
        self._end_s = math.inf  # on the monotonic clock
        self._thread: threading.Thread | None = None

    def begin(self, is_busy: Callable[[], bool], cpus: tuple[int, ...] = ()) -> None:
        """Start the thread, on ``cpus``. While ``is_busy`` it rests most of the time."""

        def after_piece(took_s: float) -> None:
            if time.monotonic() > self._end_s:
                raise TimeoutError(errno.ETIMEDOUT, "the engine ended before they were written")
            if is_busy():
                self._is_closing.wait(took_s * _REST)

        def run() -> None:
            place_thread(cpus)
            self.write(after_piece)

        self._thread = threading.Thread(target=run, name="corun-late-weights", daemon=True)
        self._thread.start()

    def write(self, after_piece: Callable[[float], None] = lambda _s: None) -> None:
        """Write all of them in this thread, instead of ``begin``; see ``KeptWeights.write``."""
        matrices, self._matrices = self._matrices, {}
        self._kept.write(matrices, after_piece)

    def close(self) -> None:
        """Write the rest without a break, or give up after 2 s. Idempotent."""
        self._end_s = min(self._end_s, time.monotonic() + _CLOSE_S)
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S + 1)  # a call of a disk that hangs ends with the process


def cached_answer(directory: Path, question: str, find: Callable[[], str]) -> str:
    """The stored answer of ``find`` to ``question``, or a new one: both hexadecimal digests."""
    note = directory / f"{question}{_NOTE_SUFFIX}"
    try:
        answer = note.read_text()
    except OSError:
        answer = ""
    if re.fullmatch("[0-9a-f]{64}", answer):
        mark_as_used(note)
        return answer
    answer = find()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(note) as file:
            file.write(answer.encode())
    except OSError as error:
        _LOG.warning("cannot write %s: %s", note, error.strerror or error)
    return answer


def _write(file: IO[bytes], matrices: Mapping[str, Arrays], after_piece: Callable[[float], None]) -> None:
    index: dict[str, dict[str, Any]] = {}
    position = 0
    for name, arrays in matrices.items():
        index[name] = {}
        for key, array in arrays.items():
            index[name][key] = {
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "start": position,
                "sha256": hashlib.sha256().hexdigest(),  # so the index has its final length
            }
            position = _aligned(position + array.nbytes)
    length = len(json.dumps(index).encode())
    start = _aligned(_LENGTH_BYTES + length)
    for name, arrays in matrices.items():
        for key, array in arrays.items():
            file.seek(start + index[name][key]["start"])
            index[name][key]["sha256"] = _write_array(file, array, after_piece)
    file.seek(0)
    file.write(length.to_bytes(_LENGTH_BYTES, "little"))
    file.write(json.dumps(index).encode())


def _write_array(file: IO[bytes], array: np.ndarray, after_piece: Callable[[float], None]) -> str:
    """Write the array at the file's position; return its digest."""
    digest, view = hashlib.sha256(), np.ascontiguousarray(array).data.cast("B")
    for position in range(0, len(view), _PIECE_BYTES):
        begin_s = time.perf_counter()
        piece = view[position : position + _PIECE_BYTES]
        digest.update(piece)  # in the processor's cache for the copy
        file.write(piece)
        after_piece(time.perf_counter() - begin_s)
    return digest.hexdigest()


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
