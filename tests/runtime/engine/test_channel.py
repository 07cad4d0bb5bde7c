"""Frames over a real socket pair: any chunking, a stalled peer, a broken peer, the end."""

import asyncio
import os
import select
import socket
from collections.abc import Iterator

import pytest
from corun.runtime.engine import channel as channel_module
from corun.runtime.engine.channel import AsyncChannel, Channel, ChannelError, FrameReader, encode_frame
from corun.runtime.engine.messages import (
    AbortRequests,
    AddAdapter,
    AddRequest,
    AddRequests,
    EngineStats,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from corun.runtime.plan import RequestId, TokenLogprobs
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.events import RequestUpdate
from hypothesis import given
from hypothesis import strategies as st

MESSAGES: list[ToEngine] = [
    AddRequests(
        (
            AddRequest(
                1, (1, 2, 3), SamplingParams(seed=2**64 - 1, stop=("a", "b"), logprobs=2), "name", "salt"
            ),
            AddRequest(2, tuple(range(1000)), SamplingParams(seed=-5, max_tokens=None)),
        )
    ),
    AbortRequests((1, 2)),
    AddAdapter(7, "ä", "/somewhere"),
    Shutdown(),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_equal_and_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    sender: Channel[FromEngine] = Channel(pair[0], FromEngine)
    receiver: Channel[ToEngine] = Channel(pair[1], ToEngine)
    for message in MESSAGES:
        sender.send(message)
    assert receiver.receive() == MESSAGES
    assert receiver.receive() == []
    assert not receiver.at_end


def test_step_outputs_keep_their_types(pair: tuple[socket.socket, socket.socket]) -> None:
    logprobs = (TokenLogprobs(-0.25, 1, (3, 4), (-0.25, -2.0)),)
    message = StepOutputs(
        (RequestUpdate(RequestId(1), (3,), logprobs), RequestUpdate(RequestId(2), finish_reason="stop")),
        stats=EngineStats(running_adapters=("a",)),
    )
    Channel[ToEngine](pair[0], ToEngine).send(message)
    (received,) = Channel[FromEngine](pair[1], FromEngine).receive()
    assert received == message


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 40), min_size=1))
def test_frames_survive_any_chunking(payloads: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(len(one).to_bytes(4, "little") + one for one in payloads)
    reader = FrameReader()
    received: list[bytes] = []
    position = turn = 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        received += reader.feed(stream[position : position + size])
        position += size
        turn += 1
    assert received == payloads


def test_an_absurd_length_is_refused() -> None:
    with pytest.raises(ChannelError, match="4294967295 bytes"):
        FrameReader().feed(b"\xff\xff\xff\xff")


def test_a_message_of_another_kind_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].send(encode_frame({"not": "a message"}))
    with pytest.raises(ChannelError, match="cannot be decoded"):
        Channel[ToEngine](pair[1], ToEngine).receive()


def test_a_stalled_peer_does_not_block_and_gets_everything_later(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender: Channel[FromEngine] = Channel(pair[0], FromEngine)
    receiver: Channel[ToEngine] = Channel(pair[1], ToEngine)
    sent = [AbortRequests(tuple(range(index, index + 500))) for index in range(2000)]
    for message in sent:
        sender.send(message)
    assert sender.has_unsent
    received: list[ToEngine] = []
    while len(received) < len(sent):
        select.select([receiver], [], [], 10)
        received += receiver.receive()
        sender.flush()
    assert received == sent
    assert not sender.has_unsent


def test_what_is_kept_for_a_stalled_peer_is_bounded(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT_BYTES", 1 << 20)
    sender: Channel[FromEngine] = Channel(pair[0], FromEngine)
    message = AbortRequests(tuple(range(50_000)))

    def flood() -> None:
        for _ in range(100):
            sender.send(message)

    with pytest.raises(ChannelError, match="at most 1048576 are buffered"):
        flood()


def test_the_end_is_seen_after_the_last_message(pair: tuple[socket.socket, socket.socket]) -> None:
    sender: Channel[FromEngine] = Channel(pair[0], FromEngine)
    receiver: Channel[ToEngine] = Channel(pair[1], ToEngine)
    sender.send(Shutdown())
    sender.close()
    assert receiver.receive() == [Shutdown()]
    receiver.receive()
    assert receiver.at_end
    receiver.send(Shutdown())  # it is not read, which is no error
    assert not receiver.has_unsent


def test_sending_to_a_closed_peer_sets_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    sender: Channel[FromEngine] = Channel(pair[0], FromEngine)
    pair[1].close()
    sender.send(Shutdown())
    assert sender.at_end


def test_flush_blocking_waits_for_a_slow_reader(pair: tuple[socket.socket, socket.socket]) -> None:
    sender: Channel[FromEngine] = Channel(pair[0], FromEngine)
    sent = [AbortRequests(tuple(range(1000))) for _ in range(1000)]
    for message in sent:
        sender.send(message)

    async def read_all() -> list[ToEngine]:
        received: list[ToEngine] = []
        closed = asyncio.get_running_loop().create_future()
        channel: AsyncChannel[ToEngine] = AsyncChannel(ToEngine, received.append, closed.set_result)
        await channel.open(pair[1])
        await asyncio.to_thread(sender.flush_blocking, 30.0)
        sender.close()
        assert await closed is None
        return received

    assert asyncio.run(read_all()) == sent


def test_flush_blocking_gives_up(pair: tuple[socket.socket, socket.socket]) -> None:
    sender: Channel[FromEngine] = Channel(pair[0], FromEngine)
    for _ in range(100):
        sender.send(AbortRequests(tuple(range(10_000))))
    assert sender.has_unsent
    sender.flush_blocking(0.05)
    assert not sender.has_unsent
    assert sender.at_end


async def _async_end(pair: tuple[socket.socket, socket.socket], data: bytes) -> Exception | None:
    received: list[ToEngine] = []
    closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    channel: AsyncChannel[ToEngine] = AsyncChannel(ToEngine, received.append, closed.set_result)
    await channel.open(pair[0])
    await asyncio.to_thread(pair[1].sendall, data)
    pair[1].close()
    return await closed


def test_the_async_side_reports_garbage(pair: tuple[socket.socket, socket.socket]) -> None:
    error = asyncio.run(_async_end(pair, b"\xff\xff\xff\xff"))
    assert isinstance(error, ChannelError)


def test_the_async_side_reports_a_plain_end(pair: tuple[socket.socket, socket.socket]) -> None:
    assert asyncio.run(_async_end(pair, encode_frame(Shutdown()))) is None


def test_the_async_side_bounds_what_it_keeps(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT_BYTES", 1 << 20)

    async def flood() -> None:
        closed = asyncio.Event()
        channel: AsyncChannel[ToEngine] = AsyncChannel(
            ToEngine, lambda message: None, lambda error: closed.set()
        )
        await channel.open(pair[0])
        message = AbortRequests(tuple(range(50_000)))

        def fill() -> None:
            for _ in range(100):
                channel.send(message)

        with pytest.raises(ChannelError, match="at most 1048576 are buffered"):
            fill()
        pair[1].close()
        channel.close()
        await closed.wait()

    asyncio.run(flood())


def test_a_channel_is_selectable(pair: tuple[socket.socket, socket.socket]) -> None:
    receiver: Channel[ToEngine] = Channel(pair[1], ToEngine)
    assert receiver.fileno() == pair[1].fileno()
    os.write(pair[0].fileno(), b"x")
    assert select.select([receiver], [], [], 10)[0] == [receiver]
