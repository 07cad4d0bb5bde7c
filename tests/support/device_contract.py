"""The contract of devices with real tensors. A device's tests derive from ``DeviceContract``.

Streams are held by waits on words that the test stores itself, so that what is concurrent is
certain and nothing depends on time.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from corun.gpu.device.base import DeviceError, DeviceTimeoutError, Event, Stream, Word
from corun.gpu.device.host_memory import HostMemory, TorchDevice
from corun.shm.atomics import load_acquire, store_release
from corun.shm.errors import ShmError
from corun.shm.segment import Segment
from corun.shm.words import wrap
from support.processes import finish, line_of, program

_SEGMENT_BYTES = 16 * 4096
_WORDS_BYTES = 4096  # the first page: words, each on its own cache line
_LINE_BYTES = 64
_LONG_S = 30.0  # for what takes milliseconds
_SHORT_S = 0.05  # for what must not happen

# Answers every signal: waits for the next sequence number, doubles x into y, stores the number.
_PEER = """
import sys
import numpy as np
from corun.shm.atomics import load_acquire, spin_until, store_release
from corun.shm.segment import Segment
from corun.shm.words import wrap
fd, start, num_rounds, payload, num_values = map(int, sys.argv[1:])
segment = Segment.attach(fd, kind="contract")
ready, done = segment.address, segment.address + 64
x = segment.view(np.int32, payload, num_values)
y = segment.view(np.int32, payload + 4 * num_values, num_values)
print("attached", flush=True)
for sequence in range(start + 1, start + num_rounds + 1):
    for _ in range(30_000):
        if spin_until(ready, wrap(sequence), 1_000_000):
            break
    else:
        sys.exit(f"no signal {sequence}, the word is {load_acquire(ready)}")
    y[:] = 2 * x
    store_release(done, wrap(sequence))
"""


@dataclass
class Rig:
    """A device with three streams, and a registered segment."""

    device: TorchDevice
    where: torch.device
    segment: Segment
    memory: HostMemory
    a: Stream
    b: Stream
    c: Stream

    def word(self, index: int) -> Word:
        """Word ``index`` of the segment, zero at first."""
        return self.memory.word(index * _LINE_BYTES, f"word {index}")

    def host(self, index: int, num_values: int = 8) -> torch.Tensor:
        """int32 [num_values] of the segment, zero at first; one per page."""
        return self.memory.tensor(_WORDS_BYTES + 4096 * index, (num_values,), torch.int32)

    def tensor(self, value: int = 0, num_values: int = 8) -> torch.Tensor:
        """int32 [num_values] on the device."""
        made = torch.full((num_values,), value, dtype=torch.int32, device=self.where)
        if self.where.type == "cuda":
            torch.cuda.synchronize()
        return made

    def hold(self, stream: Stream, word: int = 0, value: int = 1) -> None:
        """Stop ``stream`` until ``let_go`` for the same word and value."""
        self.device.wait(stream, self.word(word), value)

    def let_go(self, word: int = 0, value: int = 1) -> None:
        """Store what ``hold`` waits for."""
        store_release(self.word(word).host_address, wrap(value))

    def shown(self, word: int) -> int:
        return int(load_acquire(self.word(word).host_address))

    def multiply_add(self, stream: Stream, tensor: torch.Tensor, factor: int, term: int) -> None:
        """Enqueue ``tensor = tensor * factor + term``; two of them do not commute."""

        def compute() -> None:
            tensor.mul_(factor).add_(term)

        self.device.launch(stream, compute, reads=(tensor,), writes=(tensor,))

    def is_held(self, stream: Stream) -> bool:
        """Whether the stream does not come to its end within a moment."""
        try:
            self.device.synchronize(stream, timeout_s=_SHORT_S)
        except DeviceTimeoutError:
            return True
        return False

    def finish(self, stream: Stream | None = None) -> None:
        """Come to the end of the stream, or of all."""
        self.device.synchronize(stream, timeout_s=_LONG_S)

    def recorded(self, stream: Stream) -> Event:
        """An event behind everything enqueued so far."""
        event = self.device.event()
        self.device.record(stream, event)
        return event


class DeviceContract:
    """Derive, and say how the device is made."""

    where = torch.device("cpu")

    def make_device(self) -> TorchDevice:
        """Make the device under test."""
        raise NotImplementedError

    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        """A device as all tests of the contract use it."""
        device = self.make_device()
        segment = Segment.create(_SEGMENT_BYTES, kind="contract")
        streams = [device.stream(name, is_urgent=name == "a") for name in "abc"]
        memory = device.register(segment.buffer, name="contract")
        yield Rig(device, self.where, segment, memory, *streams)
        device.close(timeout_s=1.0)
        if self.where.type == "cuda":  # a test may have adopted another
            torch.cuda.set_stream(torch.cuda.default_stream(self.where))
        memory.close()
        try:
            segment.close()
        except ShmError:  # the frames of an error that a test expected may hold tensors
            gc.collect()
            segment.close()

    # Order.

    def test_a_stream_keeps_the_order_of_its_operations(self, rig: Rig) -> None:
        x, host = rig.tensor(1), rig.host(0)
        host.fill_(7)
        rig.hold(rig.a)
        rig.multiply_add(rig.a, x, 10, 2)
        rig.multiply_add(rig.a, x, 10, 3)
        rig.device.copy(rig.a, host, x)
        rig.multiply_add(rig.a, x, 0, 0)
        rig.device.signal(rig.a, rig.word(1), 5)
        assert rig.is_held(rig.a)
        assert host.tolist() == [7] * 8 and rig.shown(1) == 0
        rig.let_go()
        rig.finish(rig.a)
        assert host.tolist() == [123] * 8 and rig.shown(1) == 5

    def test_streams_have_no_order_without_an_event(self, rig: Rig) -> None:
        rig.hold(rig.a)
        rig.device.signal(rig.a, rig.word(1), 1)
        rig.device.signal(rig.b, rig.word(2), 1)
        rig.finish(rig.b)
        assert (rig.shown(1), rig.shown(2)) == (0, 1)
        rig.let_go()
        rig.finish()

    def test_an_event_orders_streams(self, rig: Rig) -> None:
        x, host = rig.tensor(1), rig.host(0)
        rig.hold(rig.a)
        rig.multiply_add(rig.a, x, 3, 1)
        first = rig.recorded(rig.a)
        rig.device.wait_event(rig.b, first)
        rig.multiply_add(rig.b, x, 5, 2)
        second = rig.recorded(rig.b)
        rig.device.wait_event(rig.c, second)
        rig.device.copy(rig.c, host, x)
        assert rig.is_held(rig.c) and not rig.device.is_done(first)
        rig.let_go()
        rig.finish(rig.c)
        assert host.tolist() == [22] * 8
        assert rig.device.is_done(first) and rig.device.is_done(second)

    def test_several_streams_may_wait_for_one_event(self, rig: Rig) -> None:
        rig.hold(rig.a)
        event = rig.recorded(rig.a)
        for stream, word in ((rig.b, 1), (rig.c, 2)):
            rig.device.wait_event(stream, event)
            rig.device.signal(stream, rig.word(word), 1)
        assert rig.is_held(rig.b) and rig.is_held(rig.c)
        rig.let_go()
        rig.finish()
        assert (rig.shown(1), rig.shown(2)) == (1, 1)

    def test_a_computation_may_enqueue_on_its_own_stream(self, rig: Rig) -> None:
        x, host = rig.tensor(1), rig.host(0)

        def compute() -> None:
            x.add_(1)
            rig.device.copy(rig.a, host, x)
            rig.multiply_add(rig.a, x, 100, 0)

        rig.device.launch(rig.a, compute, writes=(x, host))
        rig.device.copy(rig.a, rig.host(1), x)
        rig.finish(rig.a)
        assert host.tolist() == [2] * 8 and rig.host(1).tolist() == [200] * 8

    # Copies.

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
    def test_copies_carry_bytes_both_ways(self, rig: Rig, dtype: torch.dtype) -> None:
        shape = (3, 50)
        num_bytes = 150 * dtype.itemsize
        raw = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
        source = rig.memory.tensor(_WORDS_BYTES, shape, dtype)
        back = rig.memory.tensor(_WORDS_BYTES + 8192, shape, dtype)
        source.view(torch.uint8).view(-1).copy_(raw)
        on_device = torch.empty(shape, dtype=dtype, device=rig.where)
        moved = torch.empty_like(on_device)
        rig.device.copy(rig.a, on_device, source)
        rig.device.copy(rig.a, moved, on_device)
        rig.device.copy(rig.a, back, moved)
        rig.finish(rig.a)
        assert torch.equal(back.view(torch.uint8).view(-1), raw)

    def test_copies_that_do_not_match_are_refused(self, rig: Rig) -> None:
        x = rig.tensor(num_values=8)
        for host in (
            rig.host(0, 9),
            rig.memory.tensor(_WORDS_BYTES, (8,), torch.float32),
            rig.host(0, 16)[::2],
        ):
            with pytest.raises(DeviceError):
                rig.device.copy(rig.a, x, host)
        rig.finish()

    # Words.

    def test_signals_and_waits_reach_another_process(self, rig: Rig) -> None:
        """Payload and flag in both directions, across the wrap-around of the flag."""
        num_rounds, num_values, start = 100, 2000, 2**31 - 50
        x, y = (
            rig.host(0, num_values),
            rig.memory.tensor(_WORDS_BYTES + 4 * num_values, (num_values,), torch.int32),
        )
        kept = rig.memory.tensor(_WORDS_BYTES + 8 * num_values, (num_rounds,), torch.int32)
        values, answer = rig.tensor(1, num_values), rig.tensor(0, num_values)
        for word in (0, 1):
            rig.let_go(word, start)
        with program(
            _PEER, rig.segment.fd, start, num_rounds, _WORDS_BYTES, num_values, pass_fds=[rig.segment.fd]
        ) as peer:
            assert line_of(peer) == "attached"
            for number in range(num_rounds):
                sequence = start + 1 + number
                rig.device.copy(rig.a, x, values)
                rig.device.signal(rig.a, rig.word(0), sequence)
                rig.device.wait(rig.a, rig.word(1), sequence)
                rig.device.copy(rig.a, answer, y)
                rig.device.copy(rig.a, kept[number : number + 1], answer[-1:])
                rig.multiply_add(rig.a, values, 1, 1)
            rig.finish(rig.a)
            finish(peer)
        assert kept.tolist() == [2 * (1 + number) for number in range(num_rounds)]

    @pytest.mark.parametrize(
        ("shown", "awaited", "passes"),
        [
            (0, 0, True),
            (5, 4, True),
            (4, 5, False),
            (2**31 - 1, 2**31, False),
            (2**31, 2**31 - 1, True),
            (2**32 - 1, 2**32, False),
            (0, 2**32 - 1, True),
            (2**31 - 1, 0, True),
            (2**31, 0, False),
            (3, 2**32 + 3, True),
        ],
    )
    def test_values_are_compared_cyclically(self, rig: Rig, shown: int, awaited: int, passes: bool) -> None:
        rig.let_go(0, shown)
        rig.hold(rig.a, 0, awaited)
        assert rig.is_held(rig.a) is not passes
        rig.let_go(0, awaited)
        rig.finish(rig.a)

    def test_a_signal_wraps_around(self, rig: Rig) -> None:
        for value in (2**31 - 1, 2**31, 2**32 - 1, 2**32):
            rig.device.signal(rig.a, rig.word(0), value)
            rig.device.wait(rig.a, rig.word(0), value)
            rig.finish(rig.a)
            assert rig.shown(0) == wrap(value)
