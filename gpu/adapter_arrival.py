"""How an adapter gets from the arena to where the kernels read it: in place, or by copies.

On a CPU without a link the kernels read the arena itself. Otherwise its regions are copied one by
one on a stream of their own. Workers on the host compute from the same regions, so these are
always packed for them; where the device's kernels want plain rows, each region goes through one
buffer on the device and is unpacked from there, which costs some of the device's bandwidth and
neither the link's nor a second copy on the host.
"""

from collections.abc import Sequence

import torch

from ..runtime.errors import AdapterError
from ..shm.region import ALIGNMENT_BYTES
from .adapter_store import HostAdapter
from .device.base import DeviceError, Event
from .device.host_memory import TorchDevice
from .lora.adapter_layout import AdapterLayout, GroupPlan, TargetMatrices
from .lora.base import PackedLora
from .lora.matrix_layout import PACKED, MatrixLayout, unpack_a, unpack_b
from .lora.table import DeviceAdapter

_ERROR_TIMEOUT_S = 5.0


class InPlace:
    """An adapter that is where it is needed; see ``adapter_loader.Arrival``."""

    def __init__(self, host: HostAdapter, layout: AdapterLayout) -> None:
        """The kernels read ``host`` until the adapter is evicted."""
        self._host = host
        self._layout = layout

    def start(self) -> None:
        """Nothing is copied."""

    def is_done(self) -> bool:
        """From the start."""
        return True

    def finish(self) -> DeviceAdapter:
        """Views of the arena, which keep the reference until the adapter is released."""
        host, targets = self._host, {}
        for place, part in zip(host.places, host.parts, strict=True):
            for found in self._layout.matrices_in(place, part):
                targets[found.target.index] = self._layout.views(found, part)
        return DeviceAdapter(targets, release=host.release)

    def cancel(self) -> None:
        """Give the reference back."""
        self._host.release()


class AdapterCopier:
    """Where and how adapters are copied; its calls belong to the thread that owns the device."""

    def __init__(
        self, device: TorchDevice, where: torch.device, layout: AdapterLayout, wanted: MatrixLayout
    ) -> None:
        """``layout``: of the arena, packed; ``wanted``: how the device's kernels read matrices."""
        assert layout.matrices is PACKED, layout.matrices.name
        self.device = device
        self.stream = device.stream("load")
        self.layout = layout
        self.wanted = wanted
        self._where = where
        self._staging = torch.empty(0, dtype=torch.uint8)

    def device_bytes(self, plans: Sequence[GroupPlan]) -> int:
        """What an adapter takes on the device."""
        if self.wanted is PACKED:
            return sum(plan.region.num_bytes for plan in plans)
        loras = [lora for plan in plans for lora in plan.loras if lora is not None]
        return sum(
            _row_bytes(lora.rank, width, self.layout.dtype)
            for lora in loras
            for width in (lora.target.in_features, lora.target.out_features)
        )

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device, uint8, that the stream may write at once.

        torch keeps CUDA memory per stream: what another one gave back may still be read there.
        """
        made: list[torch.Tensor] = []

        def allocate() -> None:
            made.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._where))

        if self._where.type == "cuda":
            self.device.launch(self.stream, allocate)
        else:
            allocate()
        return made[0]

    def staging(self, num_bytes: int) -> torch.Tensor:
        """The buffer that packed regions go through, used in the stream's order.

        Whoever enqueues its use holds it: a larger one may take its place.
        """
        if self._staging.numel() < num_bytes:
            self._staging = self.empty(num_bytes)
        return self._staging


class Copied:
    """An adapter that is copied; see ``adapter_loader.Arrival``."""

    def __init__(self, host: HostAdapter, copier: AdapterCopier) -> None:
        """Reads ``host`` until the copies are done."""
        self._host = host
        self._copier = copier
        self._event: Event | None = None
        self._targets: dict[int, PackedLora] = {}
        self._held: list[torch.Tensor] = []  # what enqueued operations use
        self._has_arrived = False

    def start(self) -> None:
        """Enqueue all copies. Raises ``DeviceError``, or what a full device raises."""
        copier = self._copier
        found = [
            copier.layout.matrices_in(place, part)
            for place, part in zip(self._host.places, self._host.parts, strict=True)
        ]
        event = copier.device.event()
        try:
            if copier.wanted is PACKED:
                self._copy_packed(found)
            else:
                self._copy_as_rows(found)
            # Left out if anything before it has failed.
            copier.device.launch(copier.stream, self._arrive)
        finally:
            copier.device.record(copier.stream, event)
            self._event = event

    def is_done(self) -> bool:
        """Whether the stream has come past the last copy."""
        return self._event is not None and self._copier.device.is_done(self._event)

    def finish(self) -> DeviceAdapter:
        """Give the host's reference back. Raises ``AdapterError`` if a copy has failed."""
        self._let_go()
        if not self._has_arrived:
            try:
                self._copier.device.synchronize(self._copier.stream, timeout_s=_ERROR_TIMEOUT_S)
            except DeviceError as error:
                raise AdapterError(f"copying it to the device failed: {error}") from error
            raise AdapterError("copying it to the device failed, with what was copied before it")
        return DeviceAdapter(self._targets)

    def cancel(self) -> None:
        """Give the reference back once nothing is copied any more."""
        if self._event is not None and not self.is_done():
            self._copier.device.synchronize(self._copier.stream, timeout_s=_ERROR_TIMEOUT_S)
        self._let_go()

    def _arrive(self) -> None:
        self._has_arrived = True

    def _let_go(self) -> None:
        if self._event is not None:
            self._copier.device.release_event(self._event)
            self._event = None
        self._held.clear()
        self._host.release()

    def _copy_packed(self, found: Sequence[Sequence[TargetMatrices]]) -> None:
        """The regions as they are."""
        copier = self._copier
        memory = copier.empty(sum(part.numel() for part in self._host.parts))
        self._held.append(memory)
        position = 0
        for part, matrices in zip(self._host.parts, found, strict=True):
            copy = memory[position : position + part.numel()]
            position += part.numel()
            copier.device.copy(copier.stream, copy, part)
            for one in matrices:
                self._targets[one.target.index] = copier.layout.views(one, copy)

    def _copy_as_rows(self, found: Sequence[Sequence[TargetMatrices]]) -> None:
        """Region after region into one buffer, and from there to rows."""
        copier, device, stream = self._copier, self._copier.device, self._copier.stream
        memory = copier.empty(sum(self._rows_bytes(one) for group in found for one in group))
        buffer = copier.staging(max(part.numel() for part in self._host.parts))
        self._held += [memory, buffer]
        position = 0
        for part, matrices in zip(self._host.parts, found, strict=True):
            packed = buffer[: part.numel()]
            device.copy(stream, packed, part)
            for one in matrices:
                num_bytes = self._rows_bytes(one)
                rows = self._rows(one, memory[position : position + num_bytes])
                position += num_bytes
                self._targets[one.target.index] = rows
                self._unpack(copier.layout.views(one, packed), rows, buffer, memory)

    def _unpack(
        self, packed: PackedLora, rows: PackedLora, buffer: torch.Tensor, memory: torch.Tensor
    ) -> None:
        def unpack() -> None:
            rows.a.copy_(unpack_a(packed.a, *rows.a.shape))
            rows.b.copy_(unpack_b(packed.b, *rows.b.shape))

        self._copier.device.launch(self._copier.stream, unpack, reads=(buffer,), writes=(memory,))

    def _rows_bytes(self, one: TargetMatrices) -> int:
        dtype = self._copier.layout.dtype
        widths = (one.target.in_features, one.target.out_features)
        return sum(_row_bytes(one.rank, width, dtype) for width in widths)

    def _rows(self, one: TargetMatrices, memory: torch.Tensor) -> PackedLora:
        """Room for A and B as rows in ``memory``."""
        dtype, target = self._copier.layout.dtype, one.target
        b_offset = _row_bytes(one.rank, target.in_features, dtype)
        a_bytes = one.rank * target.in_features * dtype.itemsize
        b_bytes = one.rank * target.out_features * dtype.itemsize
        return PackedLora(
            a=memory[:a_bytes].view(dtype).view(one.rank, target.in_features),
            b=memory[b_offset : b_offset + b_bytes].view(dtype).view(target.out_features, one.rank),
            rank=one.rank,
            scaling=one.scaling,
        )


def _row_bytes(rank: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of one matrix as rows, rounded up so that the next one is aligned."""
    num_bytes = rank * width * dtype.itemsize
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
