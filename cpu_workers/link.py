"""Messages between two processes over a socket pair that keeps their boundaries.

One message is one packet, so nothing needs framing; whoever waits does so by ``fileno``.
"""

import select
import socket
import time
from typing import Any, Generic, TypeVar

import msgspec

Received = TypeVar("Received")

_MAX_MESSAGE_BYTES = 1 << 16
_encoder = msgspec.msgpack.Encoder()


class LinkError(Exception):
    """The peer sent what is no message of the protocol."""


def link_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends; neither is inherited unless it is passed on by number."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Link(Generic[Received]):
    """One end. ``received_type`` is what the peer sends (a msgspec union). Never blocks."""

    def __init__(self, sock: socket.socket, received_type: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received_type)
        self._unsent: list[bytes] = []
        self.at_end = False  # the peer is gone

    def fileno(self) -> int:
        """The descriptor that becomes readable with a message or at the end."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` still has something to send."""
        return bool(self._unsent)

    def receive(self) -> list[Received]:
        """Return what has arrived; sets ``at_end`` at the end. Raises ``LinkError``."""
        messages = []
        while not self.at_end:
            try:
                data = self._sock.recv(_MAX_MESSAGE_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                self.at_end = True
                break
            try:
                messages.append(self._decoder.decode(data))
            except msgspec.MsgspecError as error:
                raise LinkError(f"a message cannot be decoded: {error}") from error
        return messages

    def wait_one(self, timeout_s: float) -> Received | None:
        """Wait for the next message; None if none comes in time, or the peer is gone.

        For a peer that sends one and then waits: what came with it is dropped.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        messages = self.receive()
        deadline_s = time.monotonic() + timeout_s
        while not messages and not self.at_end:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            poll.poll(left_s * 1000)
            messages = self.receive()
        return messages[0] if messages else None

    def send(self, message: object) -> None:
        """Send ``message``; what the peer does not take now goes with a later ``flush``."""
        data = _encoder.encode(message)
        assert len(data) <= _MAX_MESSAGE_BYTES, f"{type(message).__name__} has {len(data)} bytes"
        self._unsent.append(data)
        self.flush()

    def flush(self) -> None:
        """Send what the peer takes of what was kept; drop everything once it is gone."""
        while self._unsent and not self.at_end:
            try:
                self._sock.send(self._unsent[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.at_end = True
            else:
                del self._unsent[0]
        if self.at_end:
            self._unsent.clear()

    def close(self) -> None:
        """Close this end. Idempotent."""
        self.at_end = True
        self._sock.close()
