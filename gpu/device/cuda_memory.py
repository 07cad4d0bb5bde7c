"""Host memory for copies of the device: two mechanisms, and the lookup of registered ranges.

Registering pins pages that are mapped elsewhere, such as a shared segment. Where the driver refuses
(confidential computing, some virtual machines) copies go through pinned buffers of this package and
the device does not see the memory at all.

Documented by NVIDIA: whole pages are pinned, unregistering needs the base address, and the device's
address must be queried. Known from reports: one call should stay well under 512 GiB, and one copy
must not span two registrations.
"""

import bisect
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .base import DeviceError
from .cuda_driver import Driver
from .cuda_runtime import Runtime
from .host_memory import HostMemory

MAX_PIECE_BYTES = 64 * 2**30


@dataclass(frozen=True, slots=True)
class Piece:
    """One registration: ``num_bytes`` at ``address``, and its device address, if it has one."""

    address: int
    num_bytes: int
    device_address: int | None


class Registrar(Protocol):
    """A mechanism for registering host memory."""

    def register(self, address: int, num_bytes: int) -> Piece:
        """Raises ``DeviceError`` on refusal."""

    def unregister(self, piece: Piece) -> None:
        """Raises ``DeviceError`` on refusal."""


class DriverRegistrar:
    """``cuMemHostRegister``: unlike the runtime's, its failures do not surface in torch later."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def register(self, address: int, num_bytes: int) -> Piece:
        self._driver.register(address, num_bytes)
        try:
            return Piece(address, num_bytes, self._driver.device_address(address))
        except DeviceError:
            self._driver.unregister(address)
            raise

    def unregister(self, piece: Piece) -> None:
        self._driver.unregister(piece.address)


class BounceRegistrar:
    """Leaves the memory unchanged."""

    def register(self, address: int, num_bytes: int) -> Piece:
        return Piece(address, num_bytes, None)

    def unregister(self, piece: Piece) -> None:
        pass


class Registrations:
    """Registered ranges, by address."""

    def __init__(self, registrar: Registrar) -> None:
        self.registrar = registrar
        self._pieces: list[Piece] = []  # by address
        self._lock = threading.Lock()

    def add(
        self, address: int, num_bytes: int, *, max_piece_bytes: int = MAX_PIECE_BYTES
    ) -> tuple[Piece, ...]:
        """Register whole pages, in pieces of 64 GiB at most.

        Raises ``DeviceError`` for a range that is empty, does not start and end at a page, or
        overlaps a registered one, and the registrar's errors; then nothing stays registered.
        """
        if num_bytes <= 0 or address % mmap.PAGESIZE or num_bytes % mmap.PAGESIZE:
            raise DeviceError(
                f"{num_bytes} bytes at {address:#x} cannot be registered: both must be multiples "
                f"of the page size, {mmap.PAGESIZE}, because whole pages are pinned"
            )
        with self._lock:
            for piece in self._near(address, num_bytes):
                if address < piece.address + piece.num_bytes and piece.address < address + num_bytes:
                    raise DeviceError(
                        f"{num_bytes} bytes at {address:#x} overlap with the {piece.num_bytes} "
                        f"already registered at {piece.address:#x}"
                    )
            made: list[Piece] = []
            try:
                for offset in range(0, num_bytes, max_piece_bytes):
                    size = min(max_piece_bytes, num_bytes - offset)
                    made.append(self.registrar.register(address + offset, size))
            except DeviceError:
                for piece in reversed(made):
                    self.registrar.unregister(piece)
                raise
            self._pieces = sorted([*self._pieces, *made], key=_address)
        return tuple(made)

    def find(self, address: int, num_bytes: int) -> Piece | None:
        """The registration that contains the range; None if the range is outside of all.

        Raises ``DeviceError`` if a registration contains only a part of the range.
        """
        for piece in self._near(address, num_bytes):
            end = piece.address + piece.num_bytes
            if piece.address <= address and address + num_bytes <= end:
                return piece
            if piece.address < address + num_bytes and address < end:
                raise DeviceError(
                    f"{num_bytes} bytes at {address:#x} do not lie in one registration, as a copy "
                    f"requires: {piece.num_bytes} bytes are registered at {piece.address:#x}"
                )
        return None

    def remove(self, pieces: tuple[Piece, ...]) -> None:
        """Unregister, newest first; raises the first refusal at the end. Nothing may be running."""
        errors: list[DeviceError] = []
        for piece in reversed(pieces):
            try:
                self.registrar.unregister(piece)
            except DeviceError as error:
                errors.append(error)
            with self._lock:
                self._pieces = [one for one in self._pieces if one is not piece]
        if errors:
            raise errors[0]

    def _near(self, address: int, num_bytes: int) -> list[Piece]:
        """The registrations that may have bytes of a range. There may be hundreds in all."""
        pieces = self._pieces  # replaced as a whole by ``add`` and ``remove``
        first = max(0, bisect.bisect_right(pieces, address, key=_address) - 1)
        return pieces[first : bisect.bisect_left(pieces, address + num_bytes, key=_address)]


def _address(piece: Piece) -> int:
    return piece.address


def register_memory(
    runtime: Runtime,
    registrations: Registrations,
    memory: memoryview,
    name: str,
    *,
    on_close: Callable[[HostMemory], None] = lambda _: None,
    before_part: Callable[[], None] | None = None,
) -> HostMemory:
    """Register a buffer and check that the driver knows it. Raises ``DeviceError``.

    ``before_part``: it is registered in parts; called before each change of one.
    """
    if before_part is not None:
        return _in_parts(registrations, memory, name, on_close, before_part)
    unregistered = HostMemory(memory, name=name, unregister=on_close)
    pieces = registrations.add(unregistered.address, unregistered.num_bytes)

    def unregister(closing: HostMemory) -> None:
        on_close(closing)
        registrations.remove(pieces)

    try:
        registered = HostMemory(
            memory, name=name, device_address=_common_device_address(name, pieces), unregister=unregister
        )
        if registered.device_address and not runtime.is_pinned(_first_byte(registered)):
            raise DeviceError(f"{name} is registered, but the driver does not report it as pinned")
    except DeviceError:
        registrations.remove(pieces)
        raise
    return registered


def _in_parts(
    registrations: Registrations,
    memory: memoryview,
    name: str,
    on_close: Callable[[HostMemory], None],
    before_part: Callable[[], None],
) -> HostMemory:
    parts: dict[tuple[int, int], tuple[Piece, ...]] = {}

    def pin(address: int, num_bytes: int) -> None:
        before_part()
        parts[address, num_bytes] = registrations.add(address, num_bytes)

    def unpin(address: int, num_bytes: int) -> None:
        before_part()
        registrations.remove(parts[address, num_bytes])
        del parts[address, num_bytes]

    def unregister(closing: HostMemory) -> None:
        on_close(closing)
        registrations.remove(tuple(piece for pieces in parts.values() for piece in pieces))

    return HostMemory(memory, name=name, unregister=unregister, pin=pin, unpin=unpin)


def _common_device_address(name: str, pieces: Sequence[Piece]) -> int:
    """The device address of the whole range; 0 if the device does not see it."""
    first = pieces[0]
    if first.device_address is None:
        return 0
    shift = first.device_address - first.address
    if any(piece.device_address != piece.address + shift for piece in pieces):
        raise DeviceError(f"{name}: its pieces are not adjacent in the device's address space")
    return first.device_address


def _first_byte(memory: HostMemory) -> torch.Tensor:
    return memory.tensor(0, (1,), torch.uint8)
