"""One attempt of a request at one engine: sent, counted, and uncounted when it ends."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ...server.errors import HttpError
from ..engine_types.engine_type import Translation
from ..http.calls import refusal_of
from ..policy.reports import RouteRequest
from ..wire import GATEWAY_HEADER, AdapterEntry
from .health import REFUSED
from .links import EngineLink
from .state import GatewayState
from .upstream import ConnectFailedError, EngineExchange, StaleConnectionError, UpstreamLostError

_HEADER = GATEWAY_HEADER.encode()
_ELSEWHERE = (429, 503)  # full, or about to end


class ElsewhereError(Exception):
    """This engine does not answer, and the client has received nothing: another may be tried."""

    def __init__(self, reason: HttpError, *, may_retry_here: bool = False) -> None:
        """``may_retry_here``: the same engine may be tried once more."""
        super().__init__(str(reason))
        self.reason = reason  # the client's error if no other engine answers
        self.may_retry_here = may_retry_here


class AttemptLostError(HttpError):
    """An engine ended before its answer did."""

    def __init__(self, link: EngineLink, why: object) -> None:
        text = f"engine {link.engine_id} ended before this answer was complete: {why}"
        super().__init__(502, text, code="engine_lost")


class Attempt:
    """An async context manager in which the answer is read."""

    def __init__(
        self,
        state: GatewayState,
        link: EngineLink,
        route: RouteRequest,
        entries: Sequence[AdapterEntry],
        translation: Translation,
    ) -> None:
        """``translation``: of this request for this engine."""
        self.link = link
        self.translation = translation
        self.exchange: EngineExchange | None = None
        self._state = state
        self._route = route
        self._entries = entries
        self._incarnation = link.incarnation
        self._number, self._predicted_s = state.routing.assign(route, link.server_id)
        self._num_running = link.running_beside(entries)
        link.record_sent(self._number, entries)
        self._sent_s = self._first_s = time.monotonic()
        self._has_begun = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        self.link.withdraw(self._number, self._incarnation)

    async def send(self, start: bytes, body: bytes) -> EngineExchange:
        """Send a request; return the exchange once the head of its answer is there.

        ``start``: request line and headers, without those of the body, the gateway's own header
        and the empty line.
        Raises ``ElsewhereError`` for an engine that is gone, full, or without the adapter.
        """
        body = self.translation.body(body)
        end = b"content-length: %d\r\n%b: %b:%d\r\n\r\n" % (
            len(body),
            _HEADER,
            self._state.gateway_id.encode(),
            self._number,
        )
        request = b"".join((start, end, body))
        self.link.counts.num_requests += 1
        try:
            exchange = await self._answer_to(request)
        except ConnectFailedError as error:
            self.link.eject(REFUSED, str(error))
            raise self._elsewhere(error) from None
        except UpstreamLostError as error:
            raise self._elsewhere(error) from None
        if exchange.status in _ELSEWHERE or exchange.status in (401, 403):
            raise ElsewhereError(await self._refusal(exchange))
        if exchange.status == 404 and self._entries:  # one was dropped after it was loaded
            for entry in self._entries:
                self.link.served.pop(entry.name, None)
            raise ElsewhereError(await self._refusal(exchange), may_retry_here=True)
        return exchange

    async def read(self) -> bytes:
        """Return the next bytes of the answer, or nothing at its end.

        If the engine is lost, raises ``ElsewhereError`` before the first byte and
        ``AttemptLostError`` after it.
        """
        assert self.exchange is not None
        try:
            data = await self.exchange.read()
        except UpstreamLostError as error:
            if self._has_begun:
                raise AttemptLostError(self.link, error) from None
            raise self._elsewhere(error) from None
        self._has_begun = True
        return data

    def on_first_token(self) -> None:
        """Count the first token of a stream."""
        self._first_s = time.monotonic()
        waited_s = self._first_s - self._sent_s
        self.link.counts.first_token(waited_s, self._predicted_s)
        times = self.link.answer_times
        if times is not None and self._num_running is not None:
            times.first_token(self._route.num_prompt_tokens, self._num_running, waited_s)

    def on_stream_end(self, num_tokens: int) -> None:
        """Count a complete stream of ``num_tokens`` tokens."""
        times = self.link.answer_times
        if times is not None:
            num_running = sum(self.link.state.load.num_running_by_rank.values())
            took_s = time.monotonic() - self._first_s
            times.other_tokens(max(num_tokens - 1, 0), max(num_running, 1), took_s)

    async def read_all(self) -> bytes:
        """Return the whole answer. Raises ``ElsewhereError``: the client has received nothing."""
        parts = []
        try:
            while data := await self.read():
                parts.append(data)
        except AttemptLostError as error:
            raise ElsewhereError(error) from None
        return b"".join(parts)

    async def _answer_to(self, request: bytes) -> EngineExchange:
        for is_fresh in (False, True):
            exchange = await self.link.pool.open(fresh=is_fresh)
            self.exchange = exchange
            self.link.open.add(exchange)
            exchange.send(request)
            try:
                await exchange.head()
            except StaleConnectionError:
                self._release()
            else:
                return exchange
        raise UpstreamLostError("the engine closes each connection at once")

    async def _refusal(self, exchange: EngineExchange) -> HttpError:
        body = self.translation.answer(exchange.status, await self.read_all())
        url = self.link.card.url
        if exchange.status in (401, 403):
            text = f"engine {self.link.engine_id} does not take the cluster's key"
            return HttpError(502, text, code="engine_refused")
        return refusal_of(url, exchange.status, body)

    def _elsewhere(self, why: Exception) -> ElsewhereError:
        return ElsewhereError(AttemptLostError(self.link, why))

    def _release(self) -> None:
        if self.exchange is not None:
            self.link.open.discard(self.exchange)
            self.exchange.close()
            self.exchange = None
