"""Forwards requests to engines and answers to clients; retries once at another engine.

An endpoint is an ASGI application, because streams are written without a response in between.
"""

import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from starlette.types import Receive, Scope, Send

from ...errors import NotServedError
from ...server.body import HeldBody, check_num_items, read_beside, read_body
from ...server.errors import ClientGoneError, HttpError
from ...server.open_requests import HEADER, ended_by_disconnect, given_id, new_id
from ...server.sse import DONE_EVENT, ResponseWriter
from ..engine_types.engine_type import Translation
from ..http.calls import UnreachableError, refusal_of
from ..policy.reports import RouteRequest, ServerId
from ..wire import GATEWAY_HEADER, AdapterEntry
from .bodies import BodyFacts, read_facts, read_usage
from .health import REFUSED
from .links import EngineLink
from .state import GatewayState, none_ready
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
        self._first_s = time.monotonic()
        waited_s = self._first_s - self._sent_s
        self.link.counts.first_token(waited_s, self._predicted_s)
        times = self.link.answer_times
        if times is not None and self._num_running is not None:
            times.first_token(self._route.num_prompt_tokens, self._num_running, waited_s)

    def on_stream_end(self, num_tokens: int) -> None:
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


_EVENT_END = b"\n\n"
_EVENT_START = b"data: "
_MAX_EVENT_BYTES = 1 << 20  # an incomplete event longer than this is forwarded in parts
_SESSION_HEADER = b"x-session-id"
_FORWARDED = (b"content-type", b"traceparent", b"tracestate")
# Headers between gateway and engine, and those that the server writes itself.
_NOT_FORWARDED = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server"}
)
_STREAM = b"text/event-stream"

_logger = logging.getLogger(__name__)


class Inbound:
    """A client's request, read."""

    __slots__ = ("body", "entries", "facts", "route", "start")

    def __init__(self, state: GatewayState, path: str, body: bytes, scope: Scope, facts: BodyFacts) -> None:
        """``facts``: of ``body``. Raises ``RequestError`` for a model that is not served."""
        headers = dict(scope["headers"])
        self.body = body
        self.facts = facts
        self.entries = state.adapters_meant(self.facts)
        session = headers.get(_SESSION_HEADER, b"").decode("latin-1") or None
        self.route = state.routing.route_of(self.facts, self.entries, session)
        forwarded = [b"%b: %b" % (one, headers[one]) for one in _FORWARDED if one in headers]
        lines = (
            b"POST %b HTTP/1.1" % path.encode(),
            b"authorization: Bearer " + state.cluster_key.encode(),
            *forwarded,
            b"",
        )
        self.start = b"\r\n".join(lines)


class ForwardingEndpoint:
    """Forwards the requests for one path to engines."""

    def __init__(self, state: GatewayState, path: str, *, generates: bool) -> None:
        """``generates``: answers are generated tokens, which are counted."""
        self._state = state
        self._path = path
        self._generates = generates

    async def _read(self, body: bytes, scope: Scope) -> Inbound:
        """Read a request. Raises ``RequestError`` for too many items, or no such model."""
        limits = self._state.settings.limits

        def facts() -> BodyFacts:
            check_num_items(body, limits.max_json_items)
            return read_facts(body, self._path)

        return Inbound(self._state, self._path, body, scope, await read_beside(body, facts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        writer = ResponseWriter(scope, receive, send)
        writer.request_id = given_id(scope) or new_id()
        try:
            self._state.check_accepting()
            with self._state.open_requests.track() as request:
                limit = self._state.settings.limits.max_body_bytes
                with HeldBody(self._state.body_room) as held:
                    body = await read_body(scope, receive, limit, held)
                with ended_by_disconnect(receive, request):
                    inbound = await self._read(body, scope)
                    await self._answer(inbound, writer, send)
        except ClientGoneError:
            return
        except Exception as exc:
            await writer.write_error(exc)

    async def _answer(self, inbound: Inbound, writer: ResponseWriter, send: Send) -> None:
        """Have an engine answer; on failure try one other engine."""
        tried: set[ServerId] = set()
        if inbound.facts.lora is not None:
            tried |= {one.server_id for one in self._state.links.values() if not one.can_mix}
        failed = _no_mixes() if 0 < len(tried) == len(self._state.links) else None
        for _ in range(2):
            link = self._state.choose(inbound.route, tried)
            if link is None:
                break
            try:
                translation = link.translation(await self._ensure(inbound, link), inbound.facts.model)
                if self._state.links.get(link.engine_id) is not link:
                    raise ElsewhereError(UnreachableError(f"engine {link.engine_id} has left"))
                async with Attempt(self._state, link, inbound.route, inbound.entries, translation) as attempt:
                    await self._forward(inbound, attempt, writer, send)
                return
            except ElsewhereError as error:
                failed = error.reason
                if not error.may_retry_here:
                    tried.add(link.server_id)
            link.counts.num_retried += 1
            _logger.info("engine %s did not serve a request: %s", link.engine_id, failed)
        raise failed or none_ready(self._state.why_none())

    async def _ensure(self, inbound: Inbound, link: EngineLink) -> str | None:
        """Have the engine serve the request's adapters, if any.

        Return the name of the only one at the engine. Raises ``ElsewhereError``.
        """
        name = None
        for entry in inbound.entries:
            try:
                ensured = await self._state.load_before_route.ensure(link, entry)
            except HttpError as error:
                raise ElsewhereError(error) from None
            name = ensured.model or entry.name
        return name if inbound.facts.lora is None else None

    async def _forward(self, inbound: Inbound, attempt: Attempt, writer: ResponseWriter, send: Send) -> None:
        assert writer.request_id is not None
        start = b"%b%b: %b\r\nhost: %b\r\n" % (
            inbound.start,
            HEADER,
            writer.request_id.encode(),
            attempt.link.pool.authority,
        )
        exchange = await attempt.send(start, inbound.body)
        if _content_type(exchange).startswith(_STREAM):
            try:
                num_tokens = await self._forward_stream(inbound, attempt, writer)
            except AttemptLostError:
                self._state.counts.num_lost += 1
                raise
            attempt.on_stream_end(num_tokens)
        else:
            num_tokens = await self._forward_whole(inbound, attempt, exchange, writer, send)
        if self._generates and exchange.status < 400:
            self._count(inbound, num_tokens)

    async def _forward_stream(self, inbound: Inbound, attempt: Attempt, writer: ResponseWriter) -> int:
        """Forward complete events as they arrive; return about how many tokens they had.

        An incomplete event waits for its rest, so that an error can follow as its own event.
        """
        rest = last = b""
        num_events = 0
        while data := await attempt.read():
            num_new = data.count(_EVENT_START)  # none in a comment
            if num_new and not num_events:
                attempt.on_first_token()
            num_events += num_new
            data = rest + data if rest else data
            data, rest = _whole_events(data)
            if data:
                last = data = attempt.translation.events(data)
                await writer.write_events(data)
        if not last and not rest:
            raise AttemptLostError(attempt.link, "its stream was empty")
        await writer.end_events(rest)
        usage = self._observe_usage(inbound, last)
        if usage is not None:
            return usage
        facts = inbound.facts
        if self._generates and facts.num_ids is None and facts.is_plain:
            self._state.samples.record(
                attempt.link, facts.text, inbound.route.adapter_name, is_chat=facts.is_chat
            )
        return max(num_events - last.count(DONE_EVENT) - 1, 0)

    async def _forward_whole(
        self, inbound: Inbound, attempt: Attempt, exchange: EngineExchange, writer: ResponseWriter, send: Send
    ) -> int:
        """Forward an answer once it is complete; return its tokens."""
        body = attempt.translation.answer(exchange.status, await attempt.read_all())
        headers = [one for one in exchange.headers if one[0] not in _NOT_FORWARDED]
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return self._observe_usage(inbound, body) or 0

    def _observe_usage(self, inbound: Inbound, answer: bytes) -> int | None:
        """Read the usage of an answer, if there is one; return the tokens of the output."""
        usage = read_usage(answer) if self._generates else None
        if usage is None:
            return None
        num_prompt_tokens, num_tokens = usage
        facts, name = inbound.facts, inbound.route.adapter_name
        if facts.num_ids is None:
            self._state.routing.ratio.observe(facts.text, num_prompt_tokens, name, is_chat=facts.is_chat)
        return num_tokens

    def _count(self, inbound: Inbound, num_tokens: int) -> None:
        state, name = self._state, inbound.route.adapter_name
        state.routing.record_output(name, num_tokens // inbound.facts.num_choices)
        if name is not None:
            state.counts.prompt_tokens[name] += inbound.route.num_prompt_tokens
            state.counts.output_tokens[name] += num_tokens


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Split after the last complete event; a rest that is too long is not held back."""
    if data.endswith(_EVENT_END):
        return data, b""
    found = data.rfind(_EVENT_END)
    end = 0 if found < 0 else found + len(_EVENT_END)
    return (data, b"") if len(data) - end > _MAX_EVENT_BYTES else (data[:end], data[end:])


def _no_mixes() -> HttpError:
    text = "lora is not served: the engines are vLLM servers, which take one adapter as model"
    return HttpError(400, text, code=NotServedError.code, param="lora")


def _content_type(exchange: EngineExchange) -> bytes:
    return next((value for name, value in exchange.headers if name == b"content-type"), b"")
