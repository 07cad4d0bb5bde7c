"""Writes answers: one JSON body, or a stream of server-sent events.

Most chunks of a stream differ only in a few characters of text: the rest of their JSON is written
once per choice, as bytes.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import replace

import msgspec
from starlette.types import Receive, Scope, Send

from ..errors import CorunError
from ..frontend.outputs import CompletionOutput, RequestOutput
from .errors import ErrorReply, error_reply, response_of
from .generation_request import ParsedRequest
from .open_requests import HEADER, given_id
from .responses import Timing, Usage, usage_of

DONE_EVENT = b"data: [DONE]\n\n"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers chunks would defeat streaming
)


class ResponseWriter:
    """Writes the answer to one HTTP request over ASGI: a stream, a body, or an error."""

    __slots__ = (
        *("_last_s", "_receive", "_scope", "_send"),
        *("error_event", "request_id", "status", "wants_timing"),
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.status: int | None = None  # once it was sent
        self._last_s = time.monotonic()
        self.request_id = given_id(scope)  # in the answer's headers; None: not known yet
        self.wants_timing = False  # also in errors
        self.error_event = _error_event  # makes the last event of a stream that failed

    @property
    def silent_s(self) -> float:
        """Seconds since the last write."""
        return time.monotonic() - self._last_s

    async def write_events(self, events: bytes) -> None:
        """Send complete events as soon as the client has room; first the status line."""
        if self.status is None:
            self.status = 200
            headers = [*_STREAM_HEADERS, self._name()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._last_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        """Send the last events and end the stream."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def write_json(self, body: bytes) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            self._name(),
        ]
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _name(self) -> tuple[bytes, bytes]:
        assert self.request_id is not None, "an answer without a request"
        return HEADER, self.request_id.encode()

    async def write_error(self, exc: Exception) -> None:
        """Answer with an error: as a response, or as the last event of a stream that began."""
        reply = error_reply(exc)
        if self.wants_timing and isinstance(exc, CorunError):
            reply = replace(reply, timing=exc.timing)
        if self.status is None:
            self.status = reply.status
            response = response_of(reply)
            response.raw_headers.append(self._name())
            await response(self._scope, self._receive, self._send)
            return
        await self.end_events(self.error_event(reply))


def _error_event(reply: ErrorReply) -> bytes:
    return b"data: " + reply.encode() + b"\n\n"


class StreamEncoder(ABC):
    """Encodes the events of one stream."""

    __slots__ = ()

    @abstractmethod
    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return the events for the new part of ``output``, possibly none."""

    @abstractmethod
    def end(self, usage: Usage | None, timing: Timing | None) -> bytes:
        """Return the last events; ``usage`` and ``timing``: if the request wants them."""

    def error_event(self, reply: ErrorReply) -> bytes:
        """Return the last event of a stream that failed."""
        return _error_event(reply)


class ChunkEncoder(StreamEncoder):
    """Encodes the new part of every output as a chunk with choices."""

    __slots__ = (
        "_encode_json",
        "_ended",
        "_head",
        "_latest",
        "_num_choices",
        "_shows_tokens",
        "_shows_usage",
        "_tail",
        "_text_frames",
        "_with_logprobs",
        "_with_token_ids",
    )

    def __init__(self, request: ParsedRequest) -> None:
        self._num_choices = request.sampling.n  # per prompt
        self._with_logprobs = request.sampling.logprobs is not None
        self._with_token_ids = bool(request.body.return_token_ids)
        # Whether a token without text is also an event.
        self._shows_tokens = self._with_logprobs or self._with_token_ids
        with_usage = request.body.wants_stream_usage
        self._shows_usage = request.body.wants_continuous_usage
        self._latest: dict[int, RequestOutput] = {}  # by prompt, for token counts
        self._head = b"data: " + msgspec.json.encode(request.envelope)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._encode_json = msgspec.json.Encoder().encode
        self._text_frames: dict[int, tuple[bytes, bytes]] = {}  # by choice: the JSON around its text
        self._ended: set[int] = set()

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        events = b""
        self._count(prompt_index, output)
        for choice in output.outputs:
            index = prompt_index * self._num_choices + choice.index
            frame = self._text_frames.get(index)
            if frame is None:
                before, after = self._around_text(index)
                frame = self._text_frames[index] = (self._head + before, after + b"]")
                events += self._first_event(index, output)
            if choice.finish_reason is not None:
                if index not in self._ended:
                    self._ended.add(index)
                    events += self._event(self._part(index, choice))
            elif self._shows_tokens:
                if choice.new_token_ids:
                    events += self._event(self._part(index, choice))
            elif choice.new_text:
                events += frame[0] + self._encode_json(choice.new_text) + frame[1] + self._tail
        return events

    def end(self, usage: Usage | None, timing: Timing | None) -> bytes:
        if usage is None and timing is None:
            return DONE_EVENT
        event = self._head + b"]"
        if usage is not None:
            event += b',"usage":' + self._encode_json(usage)
        if timing is not None:
            event += b',"timing":' + self._encode_json(timing)
        return event + b"}\n\n" + DONE_EVENT

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        """Update the usage in the next events, if the request wants it."""
        if self._shows_usage:
            self._latest[prompt_index] = output
            usage = self._encode_json(usage_of(self._latest.values()))
            self._tail = b',"usage":' + usage + b"}\n\n"

    def _event(self, part: msgspec.Struct, beside: bytes = b"") -> bytes:
        """Return the event of one choice; ``beside``: other members of the chunk."""
        return self._head + self._encode_json(part) + b"]" + beside + self._tail

    @abstractmethod
    def _first_event(self, index: int, output: RequestOutput) -> bytes:
        """Return what precedes the first text of choice ``index``, possibly nothing."""

    @abstractmethod
    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """Return the JSON of choice ``index`` before and after its text, if nothing else is new."""

    @abstractmethod
    def _part(self, index: int, choice: CompletionOutput) -> msgspec.Struct:
        """Return all new parts of ``choice``, with log-probabilities and its end."""
