"""One connection of a client: uvicorn's protocol with limits on time and memory.

A connection is closed when its client sends a request too slowly, sends a head that is too large,
or does not read its answers. Requests on surplus connections are marked for the application, which
refuses them.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..limits import HttpLimits
from .errors import ErrorReply
from .request_ids import HEADER, given_id, new_id

SURPLUS = "corun.surplus"  # in the extensions of a request's scope: its connection is one too many
_MAX_HEAD_BYTES = 64 << 10
_NUM_SURPLUS = 64  # surplus connections that get an answer; more are closed at once

_logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """Made by uvicorn for each connection, from a subclass that sets the two attributes."""

    limits: HttpLimits
    num_ended: Counter[str]  # connections that limits ended, by reason

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_surplus = False
        self._is_reading_head = False
        self._num_head_bytes = 0
        self._request_timer: asyncio.TimerHandle | None = None
        self._unsent_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.limits.max_unsent_bytes)
        num_beyond = len(self.connections) - self.limits.max_connections
        self._is_surplus = num_beyond > 0
        if num_beyond > _NUM_SURPLUS:
            self._cut("too_many_connections")
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_unsent_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_reading_head and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_reading_head and self._num_head_bytes > _MAX_HEAD_BYTES:
            text = f"the head of the request has more than {_MAX_HEAD_BYTES} bytes"
            self._refuse(ErrorReply(431, text, "head_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._is_surplus:
            self.scope["extensions"] = {SURPLUS: {}}

    def on_headers_complete(self) -> None:
        self._is_reading_head = False
        self._start_request_timer(self.limits.body_timeout_s, self._body_is_late)
        super().on_headers_complete()
        if self._is_surplus:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._stop_request_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        text = "the request is not valid HTTP/1.1"
        self._refuse(ErrorReply(400, text, "invalid_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unsent_timer()

    def _begin_head(self) -> None:
        self._is_reading_head, self._num_head_bytes = True, 0
        self._start_request_timer(self.limits.header_timeout_s, self._head_is_late)

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
        if is_between or (cycle is not None and not cycle.response_started):
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
        _logger.info(
            "closed a connection: its client read less than %d bytes in %g s (--max-unsent-kib, "
            "--unsent-timeout-s)", self.limits.max_unsent_bytes, self.limits.unsent_timeout_s,
        )  # fmt: skip
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
    return type("ServerConnection", (Connection,), {"limits": limits, "num_ended": num_ended})
