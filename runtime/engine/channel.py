"""Framed messages over a connected stream socket, one side in a selector loop, one in asyncio.

A frame is a 4-byte little-endian length and one MessagePack value. This module owns framing,
buffering and the end of the stream; it knows nothing of the meaning of messages. Neither side ever
blocks: data that the peer does not read is buffered, up to ``MAX_UNSENT_BYTES``.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
MAX_UNSENT_BYTES = 256 << 20
_READ_BYTES = 1 << 18

Received = TypeVar("Received")
_encoder = msgspec.msgpack.Encoder()


class ChannelError(Exception):
    """The peer broke the protocol, or has stopped reading."""


def encode_frame(message: object) -> bytes:
    """Return ``message`` (anything msgspec encodes) as one frame."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ChannelError(f"a message has {len(payload)} bytes; at most {MAX_FRAME_BYTES} can be sent")
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class FrameReader:
    """Cuts a byte stream into the payloads of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that ``data`` completes. Raises ``ChannelError`` on a bad length."""
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            length = int.from_bytes(buffer[start : start + HEADER_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise ChannelError(
                    f"a frame has a length of {length} bytes; at most {MAX_FRAME_BYTES} are allowed"
                )
            end = start + HEADER_BYTES + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + HEADER_BYTES : end]))
            start = end
        del buffer[:start]
        return payloads


def receive_one_frame(sock: socket.socket) -> bytes:
    """Return the next payload from a blocking socket, without reading beyond it.

    Raises ``ChannelError`` if the stream ends before, ``TimeoutError`` as the socket does.
    """
    length = int.from_bytes(_receive_exactly(sock, HEADER_BYTES), "little")
    if length > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame has a length of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _receive_exactly(sock, length)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = sock.recv(num_bytes - len(data))
        if not chunk:
            raise ChannelError("the peer closed the channel within or before a message")
        data += chunk
    return bytes(data)


class Channel(Generic[Received]):
    """The selector-loop side. ``received_type``: the peer's messages (a msgspec union)."""

    def __init__(self, sock: socket.socket, received_type: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received_type)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self.at_end = False  # the peer is gone: nothing is received or sent any more

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` has something to send."""
        return bool(self._unsent)

    def receive(self) -> list[Received]:
        """Return all complete messages; sets ``at_end`` at the end of the stream.

        Raises ``ChannelError`` for a broken frame or a message of another type.
        """
        payloads: list[bytes] = []
        while not self.at_end:
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.at_end = True
                break
            if not data:
                self.at_end = True
                break
            payloads += self._reader.feed(data)
            if len(data) < _READ_BYTES:
                break
        try:
            return [self._decoder.decode(payload) for payload in payloads]
        except msgspec.MsgspecError as error:
            raise ChannelError(f"a message cannot be decoded: {error}") from error

    def send(self, message: object) -> None:
        """Send ``message`` now, or buffer it for ``flush`` if the peer does not read.

        Raises ``ChannelError`` if more than ``MAX_UNSENT_BYTES`` would be buffered.
        """
        if self.at_end:
            return
        frame = encode_frame(message)
        if len(self._unsent) + len(frame) > MAX_UNSENT_BYTES:
            raise ChannelError(
                f"the peer does not read: {len(self._unsent)} bytes are unsent, "
                f"at most {MAX_UNSENT_BYTES} are buffered"
            )
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send buffered messages as far as the peer reads."""
        num_sent = 0
        view = memoryview(self._unsent)
        try:
            while num_sent < len(view):
                num_sent += self._sock.send(view[num_sent:])
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.at_end = True
            num_sent = len(view)
        finally:
            view.release()
        del self._unsent[:num_sent]

    def flush_blocking(self, timeout_s: float) -> None:
        """Send all buffered messages; give up at the peer's end or after ``timeout_s``."""
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(self._unsent)
        except OSError:
            self.at_end = True
        self._unsent.clear()
        self._sock.setblocking(False)

    def close(self) -> None:
        self.at_end = True
        self._sock.close()


class AsyncChannel(asyncio.Protocol, Generic[Received]):
    """The asyncio side: messages arrive through callbacks on the event loop.

    ``on_close`` is called exactly once, with the error (None = the stream ended), also after
    ``close``.
    """

    def __init__(
        self,
        received_type: Any,
        on_message: Callable[[Received], None],
        on_close: Callable[[Exception | None], None],
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received_type)
        self._reader = FrameReader()
        self._on_message = on_message
        self._on_close = on_close
        self._transport: asyncio.Transport | None = None
        self._failure: Exception | None = None

    async def open(self, sock: socket.socket) -> None:
        """Take ownership of ``sock`` on the running event loop."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, sock=sock)

    def send(self, message: object) -> None:
        """Queue ``message``. Raises ``ChannelError`` if the buffer is full."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        num_unsent_bytes = transport.get_write_buffer_size()
        if num_unsent_bytes > MAX_UNSENT_BYTES:
            raise ChannelError(
                f"the peer does not read: {num_unsent_bytes} bytes are unsent, "
                f"at most {MAX_UNSENT_BYTES} are buffered"
            )
        transport.write(encode_frame(message))

    def close(self) -> None:
        """Send queued messages, then close. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Decode and deliver every message that ``data`` completes."""
        assert self._transport is not None
        try:
            messages = [self._decoder.decode(payload) for payload in self._reader.feed(data)]
        except (ChannelError, msgspec.MsgspecError) as error:
            self._failure = error
            self._transport.abort()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end."""
        self._on_close(self._failure or exc)
