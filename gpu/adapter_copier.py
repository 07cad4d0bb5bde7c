"""Where adapters are copied on the device, and by which streams; see ``adapter_arrival``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .adapter_placement import Placement, row_bytes
from .device.base import Stream
from .device.host_memory import TorchDevice
from .lora.adapter_layout import AdapterLayout, GroupPlan
from .lora.matrix_layout import PACKED, MatrixLayout

# Demand loads that share the link at the same time; more follow each other.
_NUM_LOAD_STREAMS = 3
# A copy holds the copy engine up no longer than this many bytes take: activations pass between.
_CHUNK_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class Lane:
    """A stream for loads, and the buffer of those that go through one."""

    stream: Stream
    staging: torch.Tensor | None = None


class AdapterCopier:
    """Where and how adapters are copied; its calls belong to the thread that owns the device."""

    def __init__(
        self, device: TorchDevice, where: torch.device, layout: AdapterLayout, wanted: MatrixLayout
    ) -> None:
        """``layout``: of the arena, packed; ``wanted``: how the device's kernels read matrices."""
        assert layout.matrices is PACKED, layout.matrices.name
        self.device = device
        self.layout = layout
        self.wanted = wanted
        self._where = where
        self._lanes = [Lane(device.stream(f"load {n}")) for n in range(_NUM_LOAD_STREAMS)]
        self._prefetch_lane = Lane(device.stream("prefetch"))
        self._num_taken = 0
        self._reader: Stream | None = None

    def read_by(self, compute: Stream) -> None:
        """Say on which stream the kernels read adapters, if they are not done when steps are."""
        self._reader = compute

    def await_readers(self, lane: Lane) -> None:
        """Hold the lane until what is enqueued on the readers' stream is done.

        They may read memory that was given back meanwhile, and that the lane is about to write.
        """
        if self._reader is None:
            return
        event = self.device.event()
        self.device.record(self._reader, event)
        self.device.wait_event(lane.stream, event)
        self.device.release_event(event)

    def take_lane(self, *, is_prefetch: bool) -> Lane:
        """The stream for one more load: demand loads take turns, so that they share the link."""
        if is_prefetch:
            return self._prefetch_lane
        self._num_taken += 1
        return self._lanes[self._num_taken % len(self._lanes)]

    def device_bytes(self, plans: Sequence[GroupPlan]) -> int:
        """What an adapter takes on the device."""
        if self.wanted is PACKED:
            return sum(plan.region.num_bytes for plan in plans)
        loras = [lora for plan in plans for lora in plan.loras if lora is not None]
        return sum(
            row_bytes(lora.rank, width, self.layout.dtype)
            for lora in loras
            for width in (lora.target.in_features, lora.target.out_features)
        )

    def place(self, plans: Sequence[GroupPlan], group_of_layer: Sequence[int]) -> Placement:
        """Where an adapter goes at every load."""
        is_packed = self.wanted is PACKED
        return Placement(self.layout, plans, group_of_layer, is_packed=is_packed)

    def empty(self, lane: Lane, num_bytes: int) -> torch.Tensor:
        """Memory of the device, uint8, that the lane's stream may write at once.

        torch keeps CUDA memory per stream: what another one gave back may still be read there.
        """
        made: list[torch.Tensor] = []

        def allocate() -> None:
            made.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._where))

        if self._where.type == "cuda":
            self.device.launch(lane.stream, allocate)
        else:
            allocate()
        return made[0]

    def staging(self, lane: Lane, num_bytes: int) -> torch.Tensor:
        """The buffer that packed regions go through, used in the stream's order.

        Whoever enqueues its use holds it: a larger one may take its place.
        """
        if lane.staging is None or lane.staging.numel() < num_bytes:
            lane.staging = self.empty(lane, num_bytes)
        return lane.staging

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, in chunks."""
        if source.numel() <= _CHUNK_BYTES:
            self.device.copy(lane.stream, destination, source)
            return
        for start in range(0, source.numel(), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            self.device.copy(lane.stream, destination[start:end], source[start:end])
