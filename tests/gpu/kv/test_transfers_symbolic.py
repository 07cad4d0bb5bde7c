"""KV blocks are copied to the host, reused, and copied back, in every legal order."""

from collections.abc import Callable
from typing import Any

import pytest
from corun.gpu.device.base import Event
from corun.gpu.kv import transfers
from corun.gpu.kv.transfers import KvTransfers
from corun.profiles.link import Direction
from corun.runtime.plan import BlockId, HostSlot, KvTransfer, TransferId
from support.streams.symbolic import Recording, SymbolicDevice
from support.streams.symbolic_order import Kind, check, kinds
from support.streams.symbolic_program import Buffer
from support.streams.symbolic_tensors import SymbolicTensor, SymbolicTensorDevice, as_torch

BLOCK_BYTES = 64


class _Places:
    """Blocks or slots, each with successive owners."""

    block_bytes = BLOCK_BYTES

    def __init__(self, device: SymbolicDevice, name: str) -> None:
        self._device = device
        self._name = name
        self.held: dict[int, Buffer] = {}

    def take(self, number: int) -> Buffer:
        self.held[number] = self._device.lease(f"{self._name} {number}")
        return self.held[number]

    def give(self, number: int) -> None:
        self._device.give_back(self.held.pop(number))

    def bytes_of(self, first: int, count: int) -> SymbolicTensor:
        assert count == 1
        return SymbolicTensor([self.held[first]], BLOCK_BYTES)


class _Slots(_Places):
    """Like ``HostKv``, with slots that are never adjacent."""

    watch_cpus = ()

    def __init__(self, device: Any) -> None:
        super().__init__(device.symbolic, "slot")
        self.device = device
        self.compute = device.symbolic.stream("compute")
        self.demand, self.prefetch, self.to_host = map(
            device.symbolic.stream, ("demand", "prefetch", "to host")
        )

    def follows(self, slot: int) -> bool:
        return False

    def close(self) -> None:
        self.device.synchronize(timeout_s=1)


class _NoWatch:
    """Does not poll: the engine's thread polls often enough."""

    def __init__(self, *_: object) -> None:
        pass

    def add(self, event: Event) -> None:
        pass

    discard = add

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Engine:
    """The engine's thread: kernels that use blocks, and transfers."""

    def __init__(self, symbolic: SymbolicDevice) -> None:
        self.device = SymbolicTensorDevice(symbolic)
        self.slots = _Slots(self.device)
        self.compute = self.slots.compute
        symbolic.adopt(self.compute)
        self.blocks = _Places(symbolic, "block")
        self.transfers = KvTransfers(as_torch(self.slots), as_torch(self.blocks), lambda: None)
        self.num_transfers = 0

    def step(self, *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> None:
        """A step without a wait for its end, like a chunk that does not sample."""
        self.device.launch(
            self.compute,
            lambda: None,
            reads=[self.blocks.bytes_of(block, 1) for block in reads],
            writes=[self.blocks.bytes_of(block, 1) for block in writes],
        )

    def start(self, direction: Direction, *pairs: tuple[int, int], is_demand: bool = True) -> TransferId:
        self.num_transfers += 1
        transfer_id = TransferId(self.num_transfers)
        blocks, slots = zip(*pairs, strict=True)
        self.transfers.start(
            KvTransfer(
                transfer_id, direction, tuple(map(BlockId, blocks)), tuple(map(HostSlot, slots)), is_demand
            )
        )
        return transfer_id

    def wait(self, num_results: int = 1) -> None:
        """Wait until they have ended: they may have at the first poll, or only later."""
        results = self.transfers.take_results()
        while len(results) < num_results:
            self.device.synchronize(timeout_s=1)
            results += self.transfers.take_results()
        assert all(result.error is None for result in results)

    def close(self) -> None:
        self.transfers.close()
        for places in (self.blocks, self.slots):
            for number in list(places.held):
                places.give(number)
        self.device.close()


def recording(life: Callable[[Engine], None]) -> Recording:
    def host(device: SymbolicDevice) -> None:
        engine = Engine(device)
        life(engine)
        engine.close()

    return Recording(host)


def used_again_and_back(engine: Engine) -> None:
    """Copied out behind the step that fills it; its block is reused, then it is copied back."""
    engine.blocks.take(0)
    engine.slots.take(0)
    engine.step(writes=(0,))
    engine.start(Direction.TO_HOST, (0, 0))
    engine.transfers.take_results()
    engine.step(reads=(0,))  # it is still used meanwhile
    engine.wait()
    engine.device.synchronize(engine.compute, timeout_s=1)
    engine.blocks.give(0)
    engine.blocks.take(0)
    engine.step(writes=(0,))
    engine.blocks.take(1)
    engine.start(Direction.TO_DEVICE, (1, 0))
    engine.wait()
    engine.slots.give(0)
    engine.step(reads=(0, 1))


def into_a_block_that_was_just_read(engine: Engine) -> None:
    """The end of a chunk's step is not awaited: its request has ended, and its block is reused."""
    engine.blocks.take(0)
    engine.slots.take(0)
    engine.step(writes=(0,))
    engine.start(Direction.TO_HOST, (0, 0))
    engine.wait()
    engine.step(reads=(0,))
    engine.start(Direction.TO_DEVICE, (0, 0))
    engine.wait()
    engine.step(reads=(0,))


def two_on_the_host(engine: Engine) -> None:
    """Blocks 0 and 1 have been written, and copied to the slots of their numbers."""
    for number in range(2):
        engine.blocks.take(number)
        engine.slots.take(number)
    engine.step(writes=(0, 1))
    engine.start(Direction.TO_HOST, (0, 0), (1, 1))
    engine.wait()


def a_demand_beside_a_prefetch_and_a_copy_out(engine: Engine) -> None:
    two_on_the_host(engine)
    engine.blocks.take(2)
    engine.slots.take(2)
    engine.start(Direction.TO_DEVICE, (2, 0), is_demand=False)
    engine.transfers.take_results()
    engine.blocks.take(3)
    engine.start(Direction.TO_DEVICE, (3, 1))
    engine.start(Direction.TO_HOST, (0, 2))
    engine.wait(3)
    engine.step(reads=(2, 3))


def promoted(engine: Engine) -> None:
    two_on_the_host(engine)
    for number in (2, 3):
        engine.blocks.take(number)
    prefetch = engine.start(Direction.TO_DEVICE, (2, 0), (3, 1), is_demand=False)
    results = engine.transfers.take_results()
    engine.transfers.promote(prefetch)
    engine.wait(1 - len(results))
    engine.step(reads=(2, 3))


def closed_with_copies_under_way(engine: Engine) -> None:
    engine.blocks.take(0)
    engine.slots.take(0)
    engine.step(writes=(0,))
    engine.start(Direction.TO_HOST, (0, 0))
    engine.transfers.take_results()


LIVES = (
    used_again_and_back,
    into_a_block_that_was_just_read,
    promoted,
    a_demand_beside_a_prefetch_and_a_copy_out,
    closed_with_copies_under_way,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The symbolic device has one thread, and every batch is one block."""
    monkeypatch.setattr(transfers, "EventWatch", _NoWatch)
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 1)
    monkeypatch.setattr(transfers, "_MAX_PREFETCH_BATCHES", 1)


@pytest.mark.parametrize("life", LIVES)
def test_it_is_right_in_every_order(life: Callable[[Engine], None]) -> None:
    check(recording(life))


def not_ordered_with_kernels(engine: Engine) -> None:
    engine.slots.compute = None
    into_a_block_that_was_just_read(engine)


def used_again_early(engine: Engine) -> None:
    """The block is reused before the transfer has ended."""
    engine.blocks.take(0)
    engine.slots.take(0)
    engine.step(writes=(0,))
    engine.device.synchronize(timeout_s=1)
    engine.start(Direction.TO_HOST, (0, 0))
    engine.transfers.take_results()
    engine.blocks.give(0)
    engine.blocks.take(0)
    engine.wait()


def read_early(engine: Engine) -> None:
    """Kernels read a block that has not arrived yet."""
    engine.blocks.take(0)
    engine.slots.take(0)
    engine.device.host.compute(writes=[engine.slots.held[0]])
    engine.start(Direction.TO_DEVICE, (0, 0))
    engine.transfers.take_results()
    engine.step(reads=(0,))
    engine.wait()


MISTAKES: dict[Callable[[Engine], None], set[Kind]] = {
    not_ordered_with_kernels: {Kind.UNORDERED, Kind.UNWRITTEN},
    used_again_early: {Kind.USE_AFTER_HAND_ON},
    read_early: {Kind.UNORDERED, Kind.UNWRITTEN},
}


@pytest.mark.parametrize("life", MISTAKES)
def test_a_mistake_is_found(life: Callable[[Engine], None]) -> None:
    assert kinds(recording(life)) == MISTAKES[life]
