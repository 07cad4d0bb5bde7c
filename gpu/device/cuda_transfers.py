"""Checks a copy, chooses its path, and paces it."""

import torch

from ...profiles.link import Direction
from .base import DeviceError
from .cuda_copies import Copies
from .cuda_memory import Registrations
from .cuda_pacing import Pacing
from .cuda_runtime import Runtime
from .cuda_streams import StreamState
from .link import PacedLink


class Transfers:
    """All copies of a device. Without ``pacing`` the link only counts bytes, not its busy time."""

    def __init__(
        self,
        runtime: Runtime,
        registrations: Registrations,
        copies: Copies,
        *,
        link: PacedLink,
        pacing: Pacing | None,
    ) -> None:
        self._runtime = runtime
        self._registrations = registrations
        self._copies = copies
        self._link = link
        self._pacing = pacing
        # Addresses and sizes of registered memory that uses the link unpaced.
        self.unpaced: list[tuple[int, int]] = []

    def check(self, destination: torch.Tensor, source: torch.Tensor) -> Direction | None:
        """The direction of a copy, None within the device.

        Raises ``DeviceError`` for buffers that differ in type or size, are not contiguous, are both
        on the host, or are on the host and neither registered nor pinned. torch would convert them
        through pageable memory, wait for the device, or ignore the stream.
        """
        if destination.dtype != source.dtype or destination.numel() != source.numel():
            raise DeviceError(
                f"a copy from {source.dtype} {tuple(source.shape)} to {destination.dtype} "
                f"{tuple(destination.shape)}: both must be of one type and size"
            )
        if not destination.is_contiguous() or not source.is_contiguous():
            raise DeviceError("the buffers of a copy must be contiguous")
        if source.numel() == 0:
            return None  # such a tensor has no address
        to_device = self._runtime.is_on_device(destination)
        from_device = self._runtime.is_on_device(source)
        if to_device and from_device:
            return None
        if not to_device and not from_device:
            raise DeviceError("a copy on a CUDA stream needs at least one buffer on the device")
        host = source if to_device else destination
        if not self._is_registered(host) and not self._runtime.is_pinned(host):
            raise DeviceError(
                f"{_num_bytes(host)} bytes at {host.data_ptr():#x} are neither registered nor "
                "pinned: a copy would wait for the device"
            )
        return Direction.TO_DEVICE if to_device else Direction.TO_HOST

    def enqueue(
        self,
        state: StreamState,
        destination: torch.Tensor,
        source: torch.Tensor,
        direction: Direction | None,
    ) -> None:
        """Enqueue a copy in the ``direction`` that ``check`` returned."""
        if direction is None:
            state.paced = None
            self._runtime.copy(state.handle, destination, source)
        elif self._pacing is None or not self._is_paced(destination, source):
            self._move(state, destination, source)
            self._link.finish(self._link.begin(direction, _num_bytes(source)))
        else:
            self._pacing.begin(state, direction, _num_bytes(source))
            try:
                self._move(state, destination, source)
            finally:
                # The agent will store the go word in any case: let it find its wait.
                self._pacing.end(state)

    def _move(self, state: StreamState, destination: torch.Tensor, source: torch.Tensor) -> None:
        host = source if self._runtime.is_on_device(destination) else destination
        if self._is_registered(host):
            self._copies.copy(state, destination, source)
        else:
            self._runtime.copy(state.handle, destination, source)

    def _is_paced(self, destination: torch.Tensor, source: torch.Tensor) -> bool:
        host = source if self._runtime.is_on_device(destination) else destination
        address = host.data_ptr()
        return not any(start <= address < start + size for start, size in self.unpaced)

    def _is_registered(self, host: torch.Tensor) -> bool:
        return self._registrations.find(host.data_ptr(), _num_bytes(host)) is not None


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
