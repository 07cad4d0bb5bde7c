"""Answers written straight over ASGI: a stream of server-sent events, or one body.

Knows nothing of what the events say.
"""

from starlette.types import Receive, Scope, Send

from .errors import error_reply, error_response

DONE_EVENT = b"data: [DONE]\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects chunks would defeat streaming
)


class EventStream:
    """The answer to one HTTP request: nothing yet, a stream of events, or a whole body."""

    __slots__ = ("_receive", "_scope", "_send", "_started", "request_id")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._started = False
        self.request_id = ""  # what the answer's headers say

    async def write(self, events: bytes) -> None:
        """Send complete events, as soon as the client has room; first the status line."""
        if not self._started:
            self._started = True
            headers = [*_HEADERS, (b"x-request-id", self.request_id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def close(self, events: bytes) -> None:
        """Send the last events and end the stream."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def reply(self, body: bytes) -> None:
        """Send ``body`` as a whole JSON answer."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self.request_id.encode()),
        ]
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, exc: Exception) -> None:
        """Answer with an error: as a response, or as an event that ends a stream that began."""
        if not self._started:
            await error_response(exc)(self._scope, self._receive, self._send)
            return
        await self.close(b"data: " + error_reply(exc).encode() + b"\n\n")
