"""Messages between two processes over a socket pair that preserves message boundaries.

One message is one packet, so there is no framing. Callers wait for messages by ``fileno``.
"""

import os
import select
import socket
import time
from typing import Any, Generic, TypeVar

import msgspec

Received = TypeVar("Received")

_MAX_MESSAGE_BYTES = 1 << 16
_encoder = msgspec.msgpack.Encoder()


class IpcError(Exception):
    """The peer sent bytes that are not a message of the protocol."""


def link_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends; a child inherits one only if its number is passed on."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Link(Generic[Received]):
    """One end. ``received_type`` is the type of the peer's messages (a msgspec union).

    Only ``wait_one`` blocks. A message may carry a descriptor, which the receiver then owns.
    """

    def __init__(self, sock: socket.socket, received_type: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received_type)
        self._unread: list[tuple[Received, int | None]] = []
        self._unsent: list[tuple[bytes, int | None]] = []
        self.at_end = False  # the peer is gone

    def fileno(self) -> int:
        """The descriptor that becomes readable on a message or at the end."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether messages are queued for ``flush``."""
        return bool(self._unsent)

    def receive(self) -> list[Received]:
        """Return messages that have arrived; sets ``at_end`` at the end. Raises ``IpcError``."""
        messages = []
        for message, descriptor in self.receive_with_descriptors():
            if descriptor is not None:
                os.close(descriptor)
            messages.append(message)
        return messages

    def receive_with_descriptors(self) -> list[tuple[Received, int | None]]:
        """Like ``receive``, each message with the descriptor that it carries."""
        self._read()
        messages, self._unread = self._unread, []
        return messages

    def wait_one(self, timeout_s: float) -> Received | None:
        """Wait for the next message; None on time-out, or if the peer is gone."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        deadline_s = time.monotonic() + timeout_s
        self._read()
        while not self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self.at_end:
                return None
            poll.poll(left_s * 1000)
            self._read()
        message, descriptor = self._unread.pop(0)
        assert descriptor is None, "wait_one is for messages without a descriptor"
        return message

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Send ``message``; what the peer does not accept now is queued for ``flush``.

        ``descriptor`` is sent along; the caller keeps its own.
        """
        data = _encoder.encode(message)
        assert len(data) <= _MAX_MESSAGE_BYTES, f"{type(message).__name__} has {len(data)} bytes"
        self._unsent.append((data, None if descriptor is None else os.dup(descriptor)))
        self.flush()

    def flush(self) -> None:
        """Send queued messages as far as the peer accepts them; drop them if it is gone."""
        while self._unsent:
            data, descriptor = self._unsent[0]
            try:
                if not self.at_end:
                    descriptors = [] if descriptor is None else [descriptor]
                    socket.send_fds(self._sock, [data], descriptors)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.at_end = True
            del self._unsent[0]
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        """Close this end and drop queued messages. Idempotent."""
        self.at_end = True
        self.flush()
        for _, descriptor in self._unread:
            if descriptor is not None:
                os.close(descriptor)
        self._unread.clear()
        self._sock.close()

    def _read(self) -> None:
        while not self.at_end:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, _MAX_MESSAGE_BYTES, 1)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data, descriptors = b"", []
            if not data:
                self.at_end = True
                break
            try:
                message = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise IpcError(f"a message cannot be decoded: {error}") from error
            self._unread.append((message, descriptors[0] if descriptors else None))
