"""Turns exceptions into the error objects that OpenAI clients expect.

Owns the mapping to HTTP status, ``type`` and ``code``. Knows nothing of routes or engines.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import CorunError, OverloadedError, RequestError
from ..timing import EngineTiming
from .responses import ChoiceTiming

_logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
SHUTTING_DOWN = "shutting_down"  # the code of refusals while the server drains
_INTERNAL_MESSAGE = "internal error while answering this request; the server's log has the cause"


# Errors of HTTP itself, beside the classes of ``runtime/errors.py``: status and meaning.
_HTTP_CODES: Mapping[str, tuple[int, str]] = {
    "invalid_json": (400, "The body is not a JSON object."),
    "invalid_type": (400, "A field's value has the wrong type."),
    "missing_field": (400, "A field is missing."),
    "unknown_field": (400, "A field is unknown, and misspelt or refused by --unknown-fields."),
    "invalid_value": (400, "A field, or a parameter of the query, has an invalid value."),
    "empty_prompt": (400, "There is no prompt."),
    "empty_messages": (400, "There are no messages."),
    "adapter_refused": (400, "An adapter's files are missing or cannot be served."),
    "invalid_api_key": (401, "The key is missing or wrong."),
    "lora_updates_not_allowed": (403, "This server does not allow changes of adapters over HTTP."),
    "unknown_url": (404, "There is no such endpoint."),
    "method_not_allowed": (405, "The endpoint takes other methods."),
    "body_too_large": (413, "The body is larger than --max-body-mib."),
    "invalid_http": (400, "The request is not valid HTTP/1.1."),
    "body_timeout": (408, "The body of the request took longer than --body-timeout-s."),
    "header_timeout": (408, "The head of the request took longer than --header-timeout-s."),
    "head_too_large": (431, "The request's head, or its trailers and chunk extensions, are too large."),
    "too_many_connections": (503, "All --max-connections are in use."),
    "too_many_idle_connections": (503, "The client has more than --max-idle-connections."),
    "internal_error": (500, "A bug in corun; the server's log has the cause."),
    "shutting_down": (503, "The server is shutting down and accepts no requests."),
    "engine_dead": (503, "The engine has died or hung; the server ends."),
    "engine_hung": (503, "The engine makes no progress (--engine-hang-s); only /ready says this."),
}


def error_codes() -> dict[str, tuple[int, str]]:
    """Return every error code with its status and meaning, ordered by status."""
    codes = dict(_HTTP_CODES)
    kinds: list[type[RequestError]] = [RequestError, *_below(RequestError)]
    for kind in kinds:
        meaning = str(kind.__doc__).partition("\n")[0]
        codes.setdefault(kind.code, (kind.status, meaning))
    return dict(sorted(codes.items(), key=lambda entry: (entry[1][0], entry[0])))


def _below(kind: type[RequestError]) -> Iterator[type[RequestError]]:
    for below in kind.__subclasses__():
        if below is not HttpError:
            yield below
            yield from _below(below)


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None  # the field
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of each answer that is an error, and the last event of a stream that failed."""

    error: ErrorDetail
    timing: ChoiceTiming | msgspec.UnsetType = msgspec.UNSET  # only with return_timing


class HttpError(RequestError):
    """A request that the HTTP layer refuses; ``status`` and ``code`` are per instance."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code


class InvalidValueError(HttpError):
    """A field has a value that is not served, or fields contradict each other."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, message, code="invalid_value", param=param)


class ClientGoneError(Exception):
    """The client closed its connection: nothing would receive an answer."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The answer for an error."""

    status: int
    message: str
    code: str
    param: str | None = None
    timing: EngineTiming | None = None  # of the request, if the engine began it
    retry_after_s: int = RETRY_AFTER_S  # for statuses that ask for a retry

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "internal_server_error"
        )

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the status needs."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 413 or self.code == SHUTTING_DOWN:
            headers["Connection"] = "close"
        return headers

    def encode(self) -> bytes:
        """Return ``{"error": {...}}`` as JSON."""
        error = ErrorDetail(self.message, self.type, self.param, self.code)
        timing = msgspec.UNSET if self.timing is None else ChoiceTiming.of(self.timing)
        return msgspec.json.encode(ErrorBody(error, timing))


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_reply(exc: BaseException) -> ErrorReply:
    """Describe ``exc`` to the client. Exceptions that are bugs of corun are logged, not shown."""
    if isinstance(exc, CorunError):
        param = exc.param if isinstance(exc, RequestError) else None
        param = "model" if param == "lora_request" else param  # HTTP's name for it
        known_s = exc.retry_after_s if isinstance(exc, OverloadedError) else None
        retry_after_s = known_s or RETRY_AFTER_S
        return ErrorReply(exc.status, str(exc), exc.code, param, retry_after_s=retry_after_s)
    _logger.error("a request failed because of a bug in corun; it gets a 500", exc_info=exc)
    return ErrorReply(500, _INTERNAL_MESSAGE, "internal_error")


def error_response(exc: BaseException) -> Response:
    """Return the HTTP response for ``exc``."""
    return response_of(error_reply(exc))


def response_of(reply: ErrorReply) -> Response:
    """Return ``reply`` as an HTTP response with the headers that its status needs."""
    return Response(
        reply.encode(), status_code=reply.status, headers=reply.headers, media_type="application/json"
    )


def routing_error(exc: HTTPException, *, method: str, path: str) -> Response:
    """Return the response for errors of Starlette's router: unknown paths and methods."""
    allowed = (exc.headers or {}).get("Allow", "")
    reply = routing_reply(exc.status_code, exc.detail, method=method, path=path, allowed=allowed)
    response = response_of(reply)
    for name, value in (exc.headers or {}).items():
        response.headers[name] = value
    return response


def routing_reply(status: int, detail: str, *, method: str, path: str, allowed: str = "") -> ErrorReply:
    """Describe an error of a framework's router; ``allowed``: the methods, for a 405."""
    if status == 404:
        return ErrorReply(404, f"there is no endpoint {path}", "unknown_url")
    if status == 405:
        return ErrorReply(405, f"{path} takes {allowed}, not {method}", "method_not_allowed")
    return ErrorReply(status, detail, RequestError.code)
