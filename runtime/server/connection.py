"""One connection of a client: uvicorn's protocol with limits on time and memory.

A connection is closed when its client sends a request too slowly, sends a head that is too large
or not valid, does not read its answers, or has too many idle connections. Requests on surplus
connections are marked for the application, which refuses them.
"""

import asyncio
import ipaddress
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ..limits import HttpLimits
from .errors import ErrorReply, HttpError, error_reply
from .open_requests import HEADER, given_id, new_id

SURPLUS = "corun.surplus"  # in the extensions of a request's scope: its connection is one too many
GENERATING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_LONG_PATHS = (*GENERATING_PATHS, "/tokenize", "/detokenize")
_MAX_HEAD_BYTES = 64 << 10
_LINE_BYTES = 4  # of a header's line beside its name and value
_PARSED_BYTES = 8 << 10  # at once: the smallest requests have about 25 bytes
_MAX_UNPARSED_BYTES = 64 << 10  # beyond them, nothing more is read until they are parsed
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")  # the characters of RFC 3986, not the syntax
_IDLE_GRACE_S = 0.25
_NUM_SURPLUS = 64  # surplus connections that get an answer; more are closed at once


_EVERY_S = 60.0

_logger = logging.getLogger(__name__)


_C = TypeVar("_C", bound=Hashable)


# Bookkeeping without I/O. IPv6 addresses with the same first 64 bits are one client, which usually
# has all of them.
class IdleConnections(Generic[_C]):
    """The idle connections of one server, by client address, the longest idle one first."""

    def __init__(self, max_per_client: int) -> None:
        """``max_per_client``: 0 = no limit."""
        self._max_per_client = max_per_client
        self._of_client: defaultdict[str, dict[_C, None]] = defaultdict(dict)
        self._crowded: set[str] = set()  # clients with too many

    def add(self, connection: _C, client: str) -> bool:
        """Add a connection that becomes idle; return whether its client has too many."""
        if not self._max_per_client:
            return False
        idle = self._of_client[client]
        idle[connection] = None
        if len(idle) <= self._max_per_client:
            return False
        self._crowded.add(client)
        return True

    def take_surplus(self, client: str | None = None) -> _C | None:
        """Remove and return the longest idle connection of a client, if that has too many.

        ``client``: None = any client that has too many.
        """
        if client is None:
            client = next(iter(self._crowded), "")
        if client not in self._crowded:
            return None
        longest_idle = next(iter(self._of_client[client]))
        self.discard(longest_idle, client)
        return longest_idle

    def discard(self, connection: _C, client: str) -> None:
        idle = self._of_client.get(client)
        if idle is not None:
            idle.pop(connection, None)
            if len(idle) <= self._max_per_client:
                self._crowded.discard(client)
            if not idle:
                del self._of_client[client]


def client_of(host: str) -> str:
    """Return the client that an address belongs to: an IPv4 address or an IPv6 network."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class MinuteLog:
    """Logs the first event at once, and those of each following minute in one line."""

    def __init__(self, text: str, *values: object) -> None:
        """``text``: a format that takes the number of events, and then ``values``."""
        self._text, self._values = text, values
        self._num_new = 0
        self._timer: asyncio.TimerHandle | None = None

    def count(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_new += 1
        if self._timer is None:
            self._write(loop)

    def _write(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._num_new:
            _logger.warning(self._text, self._num_new, *self._values)
            self._num_new = 0
            self._timer = loop.call_later(_EVERY_S, self._write, loop)


class _Flow(FlowControl):
    """uvicorn's, which resumes reading at each response; not while ``is_full``."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """Made by uvicorn for each connection, from a subclass that sets these attributes."""

    limits: HttpLimits
    num_ended: Counter[str]  # connections that limits ended, by reason
    idle: IdleConnections["Connection"]
    invalid_log: MinuteLog
    upgrade_log: MinuteLog
    unread_log: MinuteLog
    flow: _Flow

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_surplus = False
        self._is_reading_head = False
        self._is_reading_body = False
        self._num_head_bytes = 0
        self._num_frame_bytes = 0  # of trailers and chunk extensions since the last part of a body
        self._unparsed = b""  # requests behind those that are parsed and not answered
        # The request that is being answered; ``cycle`` is the last one that was parsed.
        self._answered: RequestResponseCycle | None = None
        self._client = ""
        self._request_timer: asyncio.TimerHandle | None = None
        self._unsent_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        transport.set_write_buffer_limits(high=self.limits.max_unsent_bytes)
        num_beyond = len(self.connections) - self.limits.max_connections
        if num_beyond > 0 and self._close_surplus():  # a client with too many makes room
            num_beyond = 0
        self._is_surplus = num_beyond > 0
        if num_beyond > _NUM_SURPLUS:
            self._cut("too_many_connections")
            return
        self._client = client_of(self.client[0]) if self.client else ""
        self._begin_head()
        self._becomes_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.discard(self, self._client)
        self._stop_request_timer()
        self._stop_unsent_timer()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        data, self._unparsed = self._unparsed + data, b""
        self.flow.is_full = False
        for start in range(0, len(data), _PARSED_BYTES):
            if self.transport.is_closing():
                return
            if self.pipeline and not self._is_reading_body:
                self._unparsed = data[start:]
                self._stop_request_timer()  # a head waits for earlier requests, not for its client
                self.flow.is_full = len(self._unparsed) > _MAX_UNPARSED_BYTES
                self.flow.pause_reading()
                return
            self._parse(data[start : start + _PARSED_BYTES])

    def _parse(self, data: bytes) -> None:
        is_reading = self._is_reading_head or self._is_reading_body
        if not is_reading and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:  # the request is answered without it
            self.upgrade_log.count(self.loop)
            self.cycle.keep_alive = False
        except HttpParserError as error:
            self.invalid_log.count(self.loop)
            cause = error.__context__  # of a callback here
            text = "the request is not valid HTTP/1.1"
            invalid = ErrorReply(400, text, "invalid_http")
            self._refuse(error_reply(cause) if isinstance(cause, HttpError) else invalid)
            return
        self._num_frame_bytes += len(data) if self._is_reading_body else 0
        if self._is_reading_head and self._num_head_bytes > _MAX_HEAD_BYTES:
            self._refuse(error_reply(_head_too_large()))
        elif self._num_frame_bytes > _MAX_HEAD_BYTES:
            text = f"the request has more than {_MAX_HEAD_BYTES} bytes of trailers or extensions"
            self._refuse(ErrorReply(431, text, "head_too_large"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection of a client that sends nothing more.

        A client that has left looks the same. So a request that may take long ends. Any other one
        is answered.
        """
        answered, last = self._answered, self.cycle
        if answered is None or last.more_body or answered.response_started:
            return False
        last.keep_alive = False
        return all(one.scope["path"] not in _LONG_PATHS for one in (answered, last))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._is_reading_head:  # it follows another request without a wait
            self._begin_head()
        if self._is_surplus:
            self.scope["extensions"] = {SURPLUS: {}}

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_reading_head:  # a trailer is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        _check_head(self.parser.get_http_version(), self.url, self.headers)
        super().on_headers_complete()  # it raises if the URL is not valid
        if not self.pipeline:
            self._answered = self.cycle
        self._is_reading_head, self._is_reading_body, self._num_frame_bytes = False, True, 0
        self._start_request_timer(self.limits.body_timeout_s, self._body_is_late)
        if self._is_surplus:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_frame_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_frame_bytes = 0
        self._stop_request_timer()
        self._is_reading_body = False
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before its body had arrived
            self._begin_head()
        else:
            self.idle.discard(self, self._client)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        if not is_last:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if is_last:
            self._becomes_idle()
        if self._unparsed and not self.pipeline:
            if self._is_reading_head:
                self._start_request_timer(self.limits.header_timeout_s, self._head_is_late)
            self.data_received(b"")
            if not self._unparsed and not self.pipeline:
                self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unsent_timer()

    def _begin_head(self) -> None:
        self._is_reading_head, self._num_head_bytes = True, 0
        self._start_request_timer(self.limits.header_timeout_s, self._head_is_late)

    def _becomes_idle(self) -> None:
        if self.idle.add(self, self._client):
            # The request of a new connection may have arrived and not been read yet.
            self.loop.call_later(_IDLE_GRACE_S, self._close_surplus, self._client)

    def _close_surplus(self, client: str | None = None) -> bool:
        """Close the longest idle connection of a client that has too many; return whether one has.

        ``client``: None = of any client.
        """
        surplus = self.idle.take_surplus(client)
        if surplus is not None:
            limit = self.limits.max_idle_connections
            text = f"more than {limit} connections of this client are idle (--max-idle-connections)"
            surplus._refuse(ErrorReply(503, text, "too_many_idle_connections"))
        return surplus is not None

    def _start_request_timer(self, timeout_s: float, late: Callable[[], None]) -> None:
        self._stop_request_timer()
        self._request_timer = self.loop.call_later(timeout_s, late)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _head_is_late(self) -> None:
        limit_s = self.limits.header_timeout_s
        text = f"the head of the request took more than {limit_s:g} s (--header-timeout-s)"
        self._refuse(ErrorReply(408, text, "header_timeout"))

    def _body_is_late(self) -> None:
        limit_s = self.limits.body_timeout_s
        text = f"the body of the request took more than {limit_s:g} s (--body-timeout-s)"
        self._refuse(ErrorReply(408, text, "body_timeout"))

    def _refuse(self, reply: ErrorReply) -> None:
        """Answer without the application, and close the connection."""
        self._stop_request_timer()
        self.num_ended[reply.code] += 1
        cycle = self.cycle
        is_between = self._is_reading_head and (cycle is None or cycle.response_complete)
        is_next = cycle is not None and not cycle.response_started and not self.pipeline
        if is_between or is_next:
            body = reply.encode()
            # Once its head has arrived, the request can have an id from its client.
            name = (None if is_between else given_id(self.scope)) or new_id()
            self.transport.write(
                b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b: %b\r\n"
                b"connection: close\r\n\r\n%b"
                % (STATUS_LINE[reply.status], len(body), HEADER, name.encode(), body)
            )
        self.transport.close()

    def _watch_unsent(self) -> None:
        """Close the connection unless its client keeps reading."""
        num_unsent = self.transport.get_write_buffer_size()
        timeout_s = self.limits.unsent_timeout_s
        self._unsent_timer = self.loop.call_later(timeout_s, self._check_unsent, num_unsent)

    def _check_unsent(self, num_before: int) -> None:
        # A large answer is written at once: only the progress within each interval counts.
        if num_before - self.transport.get_write_buffer_size() >= self.limits.max_unsent_bytes:
            self._watch_unsent()
            return
        self.unread_log.count(self.loop)
        self._cut("slow_reader")

    def _stop_unsent_timer(self) -> None:
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
            self._unsent_timer = None

    def _cut(self, reason: str) -> None:
        self.num_ended[reason] += 1
        self.transport.abort()


def connection_class(limits: HttpLimits, num_ended: Counter[str]) -> type[Connection]:
    """Return the connection class of one server, for uvicorn."""
    attributes = {
        "limits": limits,
        "num_ended": num_ended,
        "idle": IdleConnections[Connection](limits.max_idle_connections),
        "invalid_log": MinuteLog("refused %d requests that are not valid HTTP/1.1"),
        "upgrade_log": MinuteLog("ignored the header Upgrade of %d requests: only HTTP/1.1 is served"),
        "unread_log": MinuteLog(
            "closed %d connections: their clients read less than %d bytes in %g s "
            "(--max-unsent-kib, --unsent-timeout-s)",
            limits.max_unsent_bytes,
            limits.unsent_timeout_s,
        ),
    }
    return type("ServerConnection", (Connection,), attributes)


def _check_head(version: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Raise ``HttpError`` if a head is too large, or has not exactly one valid Host header."""
    num_bytes = len(url)
    hosts = []
    for name, value in headers:
        num_bytes += len(name) + len(value) + _LINE_BYTES
        if name == b"host":
            hosts.append(value)
    if num_bytes > _MAX_HEAD_BYTES:
        raise _head_too_large()
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        text = f"the request has {len(hosts)} Host headers, HTTP/1.1 needs one"
        raise HttpError(400, text, code="invalid_http")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise HttpError(400, "the Host header is not a host", code="invalid_http")


def _head_too_large() -> HttpError:
    text = f"the head of the request has more than {_MAX_HEAD_BYTES} bytes"
    return HttpError(431, text, code="head_too_large")
