"""Segments: memory that processes share, passed on by file descriptor.

A segment starts with one page of header (magic, version, kind, size), written once by its creator
and checked by every process that attaches. Its payload starts at the second page, so that it can be
registered with an accelerator on its own. No segment has a name (see ``backing``), so it is freed
with the last process that has it, however that process ends.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from .backing import Backing, allocate, check_space, open_backing, write
from .errors import FormatError, ShmError

VERSION = 1
HEADER_BYTES = mmap.PAGESIZE

# magic, version, header bytes, payload bytes, is_sparse, backing, kind
_HEADER = struct.Struct("<8sIIQI8s32s")
_MAGIC = b"corunshm"
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


class Segment:
    """Shared memory of a fixed size, mapped readable and writable.

    ``num_bytes`` is the payload's size, ``address`` where it is mapped in this process. Create
    and attach are different calls: only ``create`` writes the header and clears the memory.
    Handles are not thread-safe to close; the memory itself has no locks at all.
    """

    def __init__(self, fd: int, kind: str, num_bytes: int, *, is_sparse: bool, backing: str) -> None:
        """For ``create`` and ``attach``; takes ownership of ``fd``, also if it raises."""
        self.fd = fd
        self.kind = kind
        self.num_bytes = num_bytes
        self.is_sparse = is_sparse
        self.backing = backing
        # Faults in all pages now, so that no time-critical wait meets a fault; but not in holes.
        flags = mmap.MAP_SHARED | (0 if is_sparse else mmap.MAP_POPULATE)
        try:
            self._map = mmap.mmap(fd, _file_bytes(num_bytes), flags=flags)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ShmError(f"cannot map segment {kind} of {num_bytes} bytes: {error}") from error
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, num_bytes: int, *, kind: str, backing: Backing = "auto", is_sparse: bool = False) -> Self:
        """Make a segment of ``num_bytes``, all zero, readable by this user only.

        All its memory is allocated at once, on the NUMA node of the calling thread. A sparse one
        has no memory until ``allocate``: touching any other byte of it may kill the process.

        Raises ``SpaceError`` if there is too little memory, ``ShmError`` if shared memory fails.
        """
        if num_bytes <= 0:
            raise ShmError(f"a segment needs at least one byte; {kind} was given {num_bytes}")
        encoded = kind.encode()
        assert 0 < len(encoded) <= 32, kind
        fd, chosen = open_backing(kind, _file_bytes(num_bytes), backing)
        try:
            _set_size(fd, _file_bytes(num_bytes), kind)
            allocate(fd, 0, HEADER_BYTES if is_sparse else _file_bytes(num_bytes), what=kind, backing=chosen)
        except BaseException:
            os.close(fd)
            raise
        segment = cls(fd, kind, num_bytes, is_sparse=is_sparse, backing=chosen)
        _HEADER.pack_into(
            segment._map, 0, _MAGIC, VERSION, HEADER_BYTES, num_bytes, is_sparse, chosen.encode(), encoded
        )
        return segment

    @classmethod
    def attach(cls, fd: int, *, kind: str) -> Self:
        """Map the segment behind a descriptor that another process handed over.

        The caller keeps ``fd``: the segment has its own copy, ``self.fd``.
        Raises ``FormatError`` if it is not a whole segment of this kind and version.
        """
        try:
            own_fd = os.dup(fd)
        except OSError as error:
            raise FormatError(f"descriptor {fd} for segment {kind} is not open") from error
        try:
            num_bytes, is_sparse, backing = _check(own_fd, kind)
        except BaseException:
            os.close(own_fd)
            raise
        return cls(own_fd, kind, num_bytes, is_sparse=is_sparse, backing=backing)

    @property
    def address(self) -> int:
        """The address of the payload in this process; a multiple of the page size."""
        self._check_open()
        return self._base + HEADER_BYTES

    @property
    def buffer(self) -> memoryview:
        """The payload, writable. Release it and its parts before ``close``.

        A new object every time, because tensors made from one hold only the object.
        """
        self._check_open()
        return memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + self.num_bytes]

    @property
    def pages(self) -> memoryview:
        """The whole pages of the payload, for registration; otherwise like ``buffer``."""
        self._check_open()
        return memoryview(self._map)[HEADER_BYTES:]

    def view(self, dtype: npt.DTypeLike, offset: int, count: int) -> np.ndarray:
        """An array [count] of the payload from byte ``offset`` on. Release it before ``close``."""
        return np.frombuffer(self.buffer, dtype, count, offset)

    def allocate(self, offset: int, num_bytes: int, *, held_bytes: int = 0) -> None:
        """Allocate memory for a range of a sparse segment; keeps contents. ``SpaceError``.

        ``held_bytes``: of the range that have memory already.
        """
        self._check_range(offset, num_bytes)
        start, missing_bytes = HEADER_BYTES + offset, num_bytes - held_bytes
        allocate(self.fd, start, num_bytes, what=self.kind, backing=self.backing, missing_bytes=missing_bytes)

    def check_space(self, num_bytes: int) -> None:
        """Raise ``SpaceError`` if ``allocate`` of so many bytes would find too little memory."""
        check_space(num_bytes, what=self.kind, backing=self.backing)

    def write(self, offset: int, data: memoryview) -> None:
        """Write to a sparse segment, which gets the memory that it needs. Raises ``SpaceError``."""
        self._check_range(offset, data.nbytes)
        write(self.fd, HEADER_BYTES + offset, data, what=self.kind, backing=self.backing)

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Return the memory of a range of a sparse segment to the system; it then reads as zero.

        Pages that the range covers only partly are cleared in that part and kept.
        """
        self._check_range(offset, num_bytes)
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.fallocate(
            self.fd,
            _KEEP_SIZE | _PUNCH_HOLE,
            ctypes.c_int64(HEADER_BYTES + offset),
            ctypes.c_int64(num_bytes),
        )
        if done != 0:
            reason = os.strerror(ctypes.get_errno())
            raise ShmError(f"cannot give back {num_bytes} bytes of {self.kind}: {reason}")

    def close(self) -> None:
        """Unmap, and close the descriptor. Idempotent; other processes keep theirs.

        Views must be released first, and with them an accelerator's registration: raises
        ``ShmError`` while arrays, tensors or memoryviews of it are alive, and leaves it open.
        (Unmapping under them would turn their next use into a crash.) Raw addresses cannot be
        tracked: code that uses one must be finished.
        """
        if self.fd < 0:
            return
        try:
            self._map.close()
        except BufferError as error:
            raise ShmError(
                f"segment {self.kind} cannot be closed while arrays, tensors or memoryviews of it "
                "are alive; drop them first"
            ) from error
        self._close_fd()

    def drop(self) -> None:
        """Close the descriptor now, and unmap with the last view. Idempotent."""
        with contextlib.suppress(BufferError):
            self._map.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.drop()  # the frames of a propagating error hold views

    def _check_open(self) -> None:
        if self.fd < 0:
            raise ShmError(f"segment {self.kind} is closed")

    def _check_range(self, offset: int, num_bytes: int) -> None:
        self._check_open()
        assert self.is_sparse, f"segment {self.kind} is allocated as a whole"
        assert num_bytes > 0 and 0 <= offset <= self.num_bytes - num_bytes, (offset, num_bytes)


def _file_bytes(num_bytes: int) -> int:
    """Header and payload in whole pages, the unit of registration with an accelerator."""
    return HEADER_BYTES + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _set_size(fd: int, num_bytes: int, kind: str) -> None:
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        hint = "; raise the limit of the size of files (ulimit -f)"
        raise ShmError(
            f"cannot make shared memory of {num_bytes} bytes for {kind}: {error.strerror}"
            f"{hint if error.errno == errno.EFBIG else ''}"
        ) from error


def _check(fd: int, kind: str) -> tuple[int, bool, str]:
    """The size, sparseness and backing of the segment in ``fd``; raises ``FormatError``."""
    try:
        header = os.pread(fd, _HEADER.size, 0)
    except OSError as error:
        raise FormatError(f"descriptor {fd} for segment {kind} is not a file: {error}") from error
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise FormatError(f"descriptor {fd} holds no segment; {kind} was expected")
    _, version, header_bytes, num_bytes, is_sparse, backing, name = _HEADER.unpack(header)
    found = name.rstrip(b"\0").decode(errors="replace")
    if version != VERSION:
        raise FormatError(f"segment {found} has version {version}; this is version {VERSION}")
    if found != kind:
        raise FormatError(f"descriptor {fd} holds segment {found}; {kind} was expected")
    if header_bytes != HEADER_BYTES:
        raise FormatError(f"segment {kind} has pages of {header_bytes} bytes, not {HEADER_BYTES}")
    file_bytes = os.fstat(fd).st_size
    if file_bytes != _file_bytes(num_bytes):
        raise FormatError(f"segment {kind} should have {_file_bytes(num_bytes)} bytes and has {file_bytes}")
    return num_bytes, bool(is_sparse), backing.rstrip(b"\0").decode()
