"""Cold starts on the symbolic device: loads, passes and workers, by the code that serves.

Real are ``Copied``, ``AdapterCopier``, ``Assistant``, ``ColdDeltas``, ``StreamHandover`` and
``WorkerGateway``. The model is launches that say what they touch; the arena's references and the
device's memory are leases, handed on as soon as they may be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from corun.cpu_workers.teams import JobModel
from corun.gpu.adapters.arrival import Copied
from corun.gpu.adapters.copier import AdapterCopier, Lane
from corun.gpu.coexec.assistant import Assistant, AssistedPass, ColdRow
from corun.gpu.coexec.cold_deltas import ColdDeltas
from corun.gpu.coexec.gateway import WorkerGateway
from corun.gpu.coexec.handover import AddByCopy, Exchange, StreamHandover
from corun.gpu.coexec.invocation import Invocation
from corun.gpu.forward.batch import LoraBatch
from corun.gpu.lora.adapter_layout import GroupKey, GroupPlan, TargetMatrices
from corun.gpu.lora.base import PackedLora
from corun.gpu.lora.matrix_layout import PACKED, ROWS
from corun.runtime.adapters.target_map import Target
from corun.shm.arena import RegionPlace
from corun.shm.region import Region, TargetSize, plan_region
from support.streams.symbolic import Recording, SymbolicDevice
from support.streams.symbolic_program import Buffer
from support.streams.symbolic_tensors import SymbolicTensor, SymbolicTensorDevice, as_torch, one
from support.streams.symbolic_workers import SymbolicPool

_WIDTH, _RANK = 16, 8
NUM_TOKENS = 8  # of a row


@dataclass(frozen=True)
class Shape:
    """Of the model, the adapters and the machine."""

    num_layers: int = 2
    num_groups: int = 1  # input groups of a layer
    group_of_layer: tuple[int, ...] = (0, 1)  # layer groups, which are loaded together
    num_workers: int = 1
    streams: str = "apart"  # apart | one | adopted: compute and transfer
    copies_y: bool = False  # AddByCopy, as on CUDA
    reads_rows: bool = False  # the kernels read plain rows, through a staging buffer
    dies_in: tuple[int, ...] = ()  # jobs in which the first worker dies


class _HostAdapter:
    """An adapter in the arena: its last reference is this one, so its room goes with it."""

    def __init__(self, device: SymbolicDevice, name: str, shape: Shape, num_whole: int | None = None) -> None:
        self._device = device
        region = plan_region(_WIDTH, 2, [TargetSize(_RANK, _WIDTH, 1.0, 256, 256)])
        keys = [(layer, g) for layer in range(shape.num_layers) for g in range(shape.num_groups)]
        self.places = tuple(RegionPlace(*key, offset, region.num_bytes) for offset, key in enumerate(keys))
        self.regions = [device.lease(f"arena {name}{number}") for number in range(len(keys))]
        self.num_whole = 0
        self.error = None
        self.read_s = None if num_whole is None else 0.0
        self.read(len(keys) if num_whole is None else num_whole)
        self.plans = [GroupPlan(key, region, (None,)) for key in keys]
        self._is_released = False

    def bytes_of(self, first: int, end: int) -> SymbolicTensor:
        assert not self._is_released
        return SymbolicTensor(self.regions[first:end], self.plans[0].region.num_bytes)

    @property
    def is_read(self) -> bool:
        return self.num_whole == len(self.regions)

    def read(self, num_whole: int) -> None:
        """As many regions as that are read from files, by another thread of the host."""
        new = self.regions[self.num_whole : num_whole]
        if new:
            self._device.host.compute(writes=new)
            self.num_whole = num_whole

    def wait_whole(self, num_regions: int, timeout_s: float) -> bool:
        self.read(num_regions)
        return True

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            for buffer in self.regions:
                self._device.give_back(buffer)


class _Layout:
    """One target in each input group."""

    matrices = PACKED
    dtype = torch.bfloat16

    def matrices_of(self, key: GroupKey, region: Region) -> tuple[TargetMatrices, ...]:
        target = Target(10 * key[0] + key[1], "", *key, _WIDTH, _WIDTH, "")
        return (TargetMatrices(target, _RANK, 1.0, 0, 0),)

    def views(self, found: TargetMatrices, part: object) -> PackedLora:
        packed = torch.zeros(1, 1, 16, 16)
        return PackedLora(packed, packed, found.rank, found.scaling)


class _Copier(AdapterCopier):
    """Takes memory as the account says: any lane may get at once what was given back."""

    def __init__(self, device: SymbolicTensorDevice, shape: Shape) -> None:
        wanted = ROWS if shape.reads_rows else PACKED
        super().__init__(as_torch(device), torch.device("cpu"), as_torch(_Layout()), wanted)
        self._shape = shape
        self._num_taken_memories = 0
        self._free: list[SymbolicTensor] = []

    def take_lane(self, *, is_prefetch: bool) -> Lane:
        self._taken = super().take_lane(is_prefetch=is_prefetch)
        return self._taken

    def memories(self, num_bytes: int, runs: Sequence[range]) -> Any:
        symbolic, stream = as_torch(self.device).symbolic, self._taken.stream
        if self._free:
            old = self._free.pop()
            names = [buffer.name for buffer in old.buffers]
            for buffer in old.buffers:
                symbolic.give_back(buffer, stream)
        else:
            number = self._num_taken_memories
            self._num_taken_memories += 1
            count = self._shape.num_layers * self._shape.num_groups
            names = [f"memory {number}.{part}" for part in range(count)]
        leases = [symbolic.lease(name, stream) for name in names]
        self.newest_memory = SymbolicTensor(leases, num_bytes // len(leases))
        return (as_torch(self.newest_memory),)

    def staging(self, lane: Lane, num_bytes: int) -> Any:
        if lane.staging is None:
            lane.staging = as_torch(one(f"staging of {lane.stream.name}"))
        return lane.staging

    def free(self, memory: SymbolicTensor) -> None:
        """The account has it back, at once."""
        self._free.append(memory)

    def close(self) -> None:
        for memory in self._free:
            for buffer in memory.buffers:
                as_torch(self.device).symbolic.give_back(buffer)


class _Backend:
    """Says what memory the deltas of a layer and group really read."""

    layout = PACKED

    def __init__(self, engine: "SymbolicEngine") -> None:
        self._engine = engine

    def add_deltas(self, x: object, ys: object, targets: object, batch: LoraBatch) -> None:
        engine = self._engine
        layer, group = engine.key
        index = layer * engine.shape.num_groups + group
        memory = [engine.memory[row].buffers[index] for row in batch.table_rows_host]
        engine.device.symbolic.launch(engine.compute, _nothing, reads=memory)


class SymbolicEngine:
    """The engine's thread: what it does is written down call by call."""

    def __init__(self, symbolic: SymbolicDevice, shape: Shape) -> None:
        self.shape = shape
        self.device = device = SymbolicTensorDevice(symbolic)
        self.compute = symbolic.stream("compute")
        transfer = symbolic.stream("transfer") if shape.streams == "apart" else self.compute
        symbolic.adopt(self.compute)
        device.adopted = self.compute if shape.streams == "adopted" else None
        self.copier = _Copier(device, shape)
        self.copier.set_compute_stream(self.compute)
        self.pool = SymbolicPool(symbolic, shape.num_workers, NUM_TOKENS, shape.dies_in)
        self.streams = {"compute": self.compute, "exchange": transfer}
        exchange = Exchange(as_torch(device), self.compute, transfer)
        gateway = WorkerGateway(
            as_torch(self.pool),
            as_torch(self.pool),
            as_torch(self.pool),
            exchange,
            JobModel(s_per_product=1.0),  # so that all workers are members
            [1.0] * shape.num_groups,
        )
        handover = StreamHandover(exchange, add_in_place)
        if shape.copies_y:
            with mock.patch.object(torch, "empty", return_value=one("landed")):
                handover = StreamHandover(exchange, AddByCopy(1, 1, torch.device("cpu")))
        backend = as_torch(_Backend(self))
        self.assistant = Assistant(handover, backend, gateway, shape.num_layers)
        self.memory: dict[int, SymbolicTensor] = {}  # by table row
        self.key: GroupKey = (0, 0)

    def fetch(self, name: str, num_whole: int | None = None) -> Copied:
        """Refer to an adapter in the arena, or one of which only so many regions are there yet."""
        self.host = host = _HostAdapter(self.device.symbolic, name, self.shape, num_whole)
        self.pool.regions = dict(enumerate(host.regions))
        placement = self.copier.place(host.plans, self.shape.group_of_layer)
        return Copied(as_torch(host), self.copier, placement)

    def start(self, copied: Copied, *, is_gradual: bool = False, row: int = 0) -> None:
        """As the loader, and what the executor enters into its table."""
        copied.start(is_gradual=is_gradual)
        if not is_gradual:
            copied.enqueue_all()
        self.memory[row] = self.copier.newest_memory

    def finish(self, copied: Copied) -> None:
        """Finish a copy as the loader does after its arrival was observed."""
        if not copied.is_done():
            self.device.synchronize(timeout_s=1)
        copied.finish()

    def evict(self, row: int = 0) -> None:
        """The table's row goes, and the last reference to the memory with it."""
        self.copier.free(self.memory.pop(row))

    def begin(
        self, split_layer: int, copied: Copied | None, row: int = 0, num_tokens: int = NUM_TOKENS
    ) -> AssistedPass:
        """Publish the jobs of one row's pass."""
        cold = ColdRow(0, num_tokens, split_layer, row, _RANK, copied)
        return self.assistant.begin([cold], torch.device("cpu"))

    def forward(self, deltas: ColdDeltas, fail_at: tuple[GroupKey, str] | None = None) -> None:
        """The model; it raises ``ArithmeticError`` where it is to fail.

        That is before begin or add, or by an operation of the stream compute or exchange.
        """
        hidden = one("hidden")
        self._launch([], [hidden])
        for layer in range(self.shape.num_layers):
            for group in range(self.shape.num_groups):
                self.key = (layer, group)
                x, y = one("x"), one("product", (1, _WIDTH))
                self._launch([hidden], [x])
                if fail_at == (self.key, "begin"):
                    raise ArithmeticError
                deltas.begin(self.key, as_torch(x))
                if fail_at == (self.key, "add"):
                    raise ArithmeticError
                if fail_at is not None and fail_at[0] == self.key and fail_at[1] in self.streams:
                    self.device.launch(self.streams[fail_at[1]], _fail)
                self._launch([x], [y])
                deltas.add(self.key, as_torch(x), [as_torch(y)], [0])
                self._launch([y], [hidden])

    def run(self, split_layer: int, copied: Copied | None, *, samples: bool = True) -> bool:
        """One pass; whether its result counts. Without a sample, the host does not wait for it."""
        num_left_out = self.device.symbolic.num_left_out
        assisted = self.begin(split_layer, copied)
        self.forward(assisted.deltas)
        counts = not assisted.finish()
        if samples:
            self.device.synchronize(self.compute, timeout_s=1)
            self.device.host.compute(reads=[Buffer("hidden")])
        is_whole = self.device.symbolic.num_left_out == num_left_out
        assert is_whole or not counts, "a result counts of which something was left out"
        return counts

    def close(self) -> None:
        """All must have been given back."""
        self.device.synchronize(timeout_s=1)
        self.copier.close()
        self.device.close()

    def _launch(self, reads: list[SymbolicTensor], writes: list[SymbolicTensor]) -> None:
        self.device.launch(self.compute, _nothing, reads=reads, writes=writes)


def add_in_place(exchange: Exchange, invocation: Invocation, ys: Sequence[torch.Tensor]) -> None:
    """As on a device that reads the rows itself."""
    exchange.device.launch(exchange.compute, _nothing, reads=(invocation.y,), writes=ys)


def _nothing() -> None:
    pass


def _fail() -> None:
    raise ArithmeticError


def recording(shape: Shape, live: Callable[[SymbolicEngine], None]) -> Recording:
    """A recording of an engine that lives so, on a device of its own."""

    def host(device: SymbolicDevice) -> None:
        engine = SymbolicEngine(device, shape)
        live(engine)
        engine.close()

    return Recording(host)
