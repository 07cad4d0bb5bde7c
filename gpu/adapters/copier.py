"""Where adapters are copied on the device, and by which streams; see ``adapter_arrival``."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...runtime.errors import ResourceError
from ..device.base import Stream
from ..device.host_memory import TorchDevice
from ..lora.adapter_layout import AdapterLayout, GroupPlan
from ..lora.matrix_layout import PACKED, MatrixLayout
from .placement import Placement, row_bytes

# Demand loads that share the link at the same time; more follow each other.
_NUM_LOAD_STREAMS = 3
# A copy holds the copy engine up no longer than this many bytes take: activations pass between.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class SlabSize:
    """Memory of the device for adapters alone."""

    num_bytes: int  # with the buffers of loads
    max_rank: int  # of any adapter


@dataclass(slots=True, eq=False)
class Lane:
    """A stream for loads, and the buffer of those that go through one."""

    stream: Stream
    staging: torch.Tensor | None = None


class AdapterCopier:
    """Where and how adapters are copied; its calls belong to the thread that owns the device."""

    def __init__(
        self, device: TorchDevice, where: torch.device, layout: AdapterLayout,
        wanted: MatrixLayout, slab: SlabSize | None = None,
    ) -> None:  # fmt: skip
        """Make the streams and the slab, which CUDA must have.

        Args:
            device: That copies.
            where: Its memory.
            layout: Of the arena, packed.
            wanted: How the device's kernels read matrices.
            slab: None = memory is taken for each adapter.

        Raises ``ResourceError`` if the slab is too small for any adapter.
        """
        assert layout.matrices is PACKED, layout.matrices.name
        assert slab is not None or where.type == "cpu", where
        self.device = device
        self.layout = layout
        self.wanted = wanted
        self._where = where
        self._lanes = [Lane(device.stream(f"load {n}")) for n in range(_NUM_LOAD_STREAMS)]
        self._prefetch_lane = Lane(device.stream("prefetch"))
        self._num_taken = 0
        self._reader: Stream | None = None
        self._slab = None if slab is None else self._make_slab(slab)

    @property
    def slab_bytes(self) -> int | None:
        """What the slab has for adapters; None = there is none."""
        return None if self._slab is None else self._slab.numel()

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

    def memory(self, num_bytes: int, offset_bytes: int | None) -> torch.Tensor:
        """Memory of the device for an adapter, uint8: of the slab, if there is one, from there on.

        The lane that is to write it has waited for its readers. Copies to it have ended: who gave
        it up has seen that.
        """
        if self._slab is None:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._where)
        assert offset_bytes is not None and offset_bytes + num_bytes <= self._slab.numel()
        return self._slab[offset_bytes : offset_bytes + num_bytes]

    def staging(self, lane: Lane, num_bytes: int) -> torch.Tensor:
        """The buffer that packed regions go through, used in the stream's order.

        Whoever enqueues its use holds it: without a slab a larger one may take its place.
        """
        if lane.staging is None or lane.staging.numel() < num_bytes:
            assert self._slab is None, f"a region of {num_bytes} bytes is above the rank's limit"
            lane.staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._where)
        return lane.staging

    def close(self) -> None:
        """Give the slab back, with nothing under way on it. Idempotent."""
        self._slab = None
        for lane in (*self._lanes, self._prefetch_lane):
            lane.staging = None

    def _make_slab(self, slab: SlabSize) -> torch.Tensor:
        """Take all memory that loads will ever need: later nobody may ask torch for any.

        torch frees and takes CUDA memory with calls that wait for the whole device, which may be
        waiting for the host.
        """
        region_bytes = 0 if self.wanted is PACKED else self.layout.max_region_bytes(slab.max_rank)
        lanes = (*self._lanes, self._prefetch_lane)
        if slab.num_bytes <= len(lanes) * region_bytes:
            raise ResourceError(
                f"{slab.num_bytes} bytes for adapters on the device are too few: {len(lanes)} "
                f"buffers of {region_bytes} bytes go off them for loads; raise "
                "--adapter-memory-fraction or --memory-gib, or lower --max-lora-rank"
            )
        memory = torch.empty(slab.num_bytes, dtype=torch.uint8, device=self._where)
        for lane in lanes:
            lane.staging, memory = memory[:region_bytes], memory[region_bytes:]
        return memory

    def copy(self, lane: Lane, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, in chunks."""
        if source.numel() <= _CHUNK_BYTES:
            self.device.copy(lane.stream, destination, source)
            return
        for start in range(0, source.numel(), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            self.device.copy(lane.stream, destination[start:end], source[start:end])
