"""Parts of the CUDA device on their own: registration in pieces, the host agent, pacing."""

import mmap
import threading
import time
from collections.abc import Callable

import pytest
import torch
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cuda_agent import HostAgent, Item
from corun.gpu.device.cuda_memory import Piece, Registrations
from corun.gpu.device.link import LinkTransfer, PacedLink
from corun.profiles.link import Direction
from support.cuda.fake_cuda import FakeEvent, FakeGpu, FakeRuntime, fake_device

PAGE = mmap.PAGESIZE


class CountingRegistrar:
    """Registers anything until ``limit`` pieces are."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.pieces: list[Piece] = []

    def register(self, address: int, num_bytes: int) -> Piece:
        if len(self.pieces) == self.limit:
            raise DeviceError("enough")
        piece = Piece(address, num_bytes, address)
        self.pieces.append(piece)
        return piece

    def unregister(self, piece: Piece) -> None:
        self.pieces.remove(piece)


def test_large_ranges_are_registered_in_pieces() -> None:
    registrar = CountingRegistrar()
    registrations = Registrations(registrar)
    pieces = registrations.add(PAGE, 5 * PAGE, max_piece_bytes=2 * PAGE)
    assert [(p.address, p.num_bytes) for p in registrar.pieces] == [
        (PAGE, 2 * PAGE),
        (3 * PAGE, 2 * PAGE),
        (5 * PAGE, PAGE),
    ]
    assert registrations.find(3 * PAGE, 2 * PAGE) == registrar.pieces[1]
    assert registrations.find(6 * PAGE, 8) is None
    for address, num_bytes in ((3 * PAGE - 4, 8), (5 * PAGE, 2 * PAGE), (0, 2 * PAGE)):
        with pytest.raises(DeviceError, match="one registration"):
            registrations.find(address, num_bytes)
    registrations.remove(pieces)
    assert not registrar.pieces
    assert registrations.find(PAGE, 4) is None


def test_a_registration_that_fails_midway_leaves_nothing() -> None:
    registrar = CountingRegistrar(limit=2)
    registrations = Registrations(registrar)
    with pytest.raises(DeviceError, match="enough"):
        registrations.add(PAGE, 5 * PAGE, max_piece_bytes=2 * PAGE)
    assert not registrar.pieces
    assert registrations.find(PAGE, 4) is None


@pytest.fixture
def failures() -> dict[int, Exception]:
    return {}


@pytest.fixture
def agent(failures: dict[int, Exception]) -> HostAgent:
    made = HostAgent(
        FakeRuntime(FakeGpu()), on_failure=failures.__setitem__, has_failed=failures.__contains__
    )
    made.start()
    return made


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def test_a_held_stream_does_not_keep_others_back(agent: HostAgent) -> None:
    fence, done = threading.Event(), []
    held = agent.submit(0, Item(FakeEvent(fence), lambda: done.append("held")))
    behind = agent.submit(0, Item(FakeEvent(), lambda: done.append("behind")))
    other = agent.submit(1, Item(FakeEvent(), lambda: done.append("other")))
    _await(lambda: agent.is_done(other))
    assert done == ["other"]
    assert not agent.is_done(behind), "items of one stream keep their order"
    fence.set()
    _await(lambda: agent.are_done([held, behind]))
    assert done == ["other", "held", "behind"]
    assert agent.last_ticket(0) is None
    agent.stop(timeout_s=5.0)


def test_an_item_comes_after_those_of_other_streams_that_it_needs(agent: HostAgent) -> None:
    fence, done = threading.Event(), []
    first = agent.submit(0, Item(FakeEvent(fence), lambda: done.append("first")))
    second = agent.submit(1, Item(FakeEvent(), lambda: done.append("second"), needs=(first,)))
    time.sleep(0.01)
    assert not agent.is_done(second)
    fence.set()
    _await(lambda: agent.is_done(second))
    assert done == ["first", "second"]
    agent.stop(timeout_s=5.0)


def test_a_failed_item_leaves_out_all_but_signals(agent: HostAgent, failures: dict[int, Exception]) -> None:
    done: list[str] = []

    def fail() -> None:
        raise OSError("no room")

    agent.submit(0, Item(FakeEvent(), fail, at_end=lambda: done.append("given back")))
    agent.submit(0, Item(FakeEvent(), lambda: done.append("copied")))
    last = agent.submit(0, Item(FakeEvent(), lambda: done.append("signalled"), is_signal=True))
    _await(lambda: agent.is_done(last))
    assert done == ["given back", "signalled"]
    assert str(failures[0]) == "no room"
    agent.stop(timeout_s=5.0)


def test_a_paced_copy_takes_as_long_as_the_link() -> None:
    """The link's own clock is compared, which no busy machine can hurry."""
    num_bytes = 1 << 16
    link = PacedLink(num_bytes / 0.2 / 2**30)
    page = mmap.mmap(-1, num_bytes)
    with fake_device(link=link) as (device, gpu):
        stream = device.stream("paced")
        memory = device.register(memoryview(page), name="shared")
        on_device = gpu.empty(num_bytes, dtype=torch.uint8)
        gate, opened_s, ran_s = threading.Event(), list[float](), list[float]()

        def hold() -> None:
            assert gate.wait(30.0), "the caller is held"
            opened_s.append(time.monotonic())

        device.launch(stream, lambda: gpu.launch(hold))
        for _ in range(3):
            device.copy(stream, on_device, memory.tensor(0, (num_bytes,), torch.uint8))
        device.launch(stream, lambda: gpu.launch(lambda: ran_s.append(time.monotonic())))
        gate.set()
        device.synchronize(timeout_s=30.0)
        assert ran_s[0] - opened_s[0] >= 0.6, "nothing behind a paced copy runs before its end"
        stats = link.stats(Direction.TO_DEVICE)
        assert stats.num_bytes == 3 * num_bytes
        assert stats.num_transfers == 0
        assert stats.busy_s == pytest.approx(0.6)


class NotedLink(PacedLink):
    """Records the given starts of transfers, and their ends."""

    def __init__(self) -> None:
        super().__init__(latency_us=1000)
        self.starts_s: list[float | None] = []
        self.ends_s: list[float] = []

    def begin(self, direction: Direction, num_bytes: int, *, start_s: float | None = None) -> LinkTransfer:
        self.starts_s.append(start_s)
        return super().begin(direction, num_bytes, start_s=start_s)

    def finish(self, transfer: LinkTransfer) -> float:
        self.ends_s.append(super().finish(transfer))
        return self.ends_s[-1]


def test_a_copy_behind_a_paced_one_starts_at_its_end_and_not_when_noticed() -> None:
    link = NotedLink()
    page = mmap.mmap(-1, PAGE)
    with fake_device(link=link) as (device, gpu):
        stream = device.stream("paced")
        memory = device.register(memoryview(page), name="shared")
        on_device = gpu.empty(16)
        for is_interrupted in (False, False, True, False):
            if is_interrupted:
                device.launch(stream, lambda: None)
            device.copy(stream, on_device, memory.tensor(0, (16,), torch.float32))
        device.synchronize(timeout_s=5.0)
    assert link.starts_s == [None, link.ends_s[0], None, link.ends_s[2]]


def test_a_paced_copy_holds_the_caller_where_the_host_waits() -> None:
    link = PacedLink(latency_us=20_000)
    page = mmap.mmap(-1, PAGE)
    with fake_device(sync="host", link=link) as (device, gpu):
        stream = device.stream("paced")
        memory = device.register(memoryview(page), name="shared")
        on_device = gpu.empty(16)
        started_s = time.monotonic()
        device.copy(stream, on_device, memory.tensor(0, (16,), torch.float32))
        assert time.monotonic() - started_s >= 0.02
        device.copy(stream, memory.tensor(0, (16,), torch.float32), on_device)
        device.synchronize(timeout_s=5.0)
        assert link.stats(Direction.TO_HOST).num_bytes == 64


def test_copies_within_the_device_are_not_paced() -> None:
    link = PacedLink(latency_us=10_000_000)
    with fake_device(link=link) as (device, gpu):
        stream = device.stream("within")
        device.copy(stream, gpu.empty(16), gpu.empty(16))
        device.synchronize(timeout_s=5.0)


def test_a_dead_device_ends_a_paced_copy() -> None:
    """Its go word is stored in any case: the stream's end must not depend on the link."""
    link = PacedLink(latency_us=60_000_000)
    page, gate = mmap.mmap(-1, PAGE), threading.Event()
    with fake_device(link=link) as (device, gpu):
        stream = device.stream("paced")
        memory = device.register(memoryview(page), name="shared")
        device.launch(stream, lambda: gpu.launch(lambda: gate.wait(5.0)))
        device.copy(stream, gpu.empty(16), memory.tensor(0, (16,), torch.float32))
        gpu.is_dead = True
        with pytest.raises(DeviceError, match="illegal access"):
            device.synchronize(timeout_s=5.0)
        gate.set()
        _await(lambda: device.streams.has_failed(stream.index))  # the agent polls it
        gpu.is_dead = False
        with pytest.raises(DeviceError, match="illegal access"):
            device.synchronize(timeout_s=5.0)


def test_an_unpaced_link_counts() -> None:
    link = PacedLink()
    page = mmap.mmap(-1, PAGE)
    with fake_device(link=link) as (device, gpu):
        stream = device.stream("free")
        memory = device.register(memoryview(page), name="shared")
        device.copy(stream, gpu.empty(16), memory.tensor(0, (16,), torch.float32))
        device.synchronize(timeout_s=5.0)
        assert link.stats(Direction.TO_DEVICE).num_bytes == 64
        assert link.stats(Direction.TO_HOST).num_bytes == 0
