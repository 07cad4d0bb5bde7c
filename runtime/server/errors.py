"""From an exception to the error object that OpenAI clients expect.

Owns the mapping to HTTP status, ``type`` and ``code``. Knows nothing of routes or engines.
"""

import logging
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import AdapterError, CorunError, EngineDeadError, RequestError
from ..timing import EngineTiming
from .responses import ChoiceTiming

_logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
SHUTTING_DOWN = "shutting_down"  # the code of refusals while the server drains
_INTERNAL_MESSAGE = "internal error while answering this request; the server's log has the cause"


class HttpError(RequestError):
    """A request that HTTP itself turns down; ``status`` and ``code`` are per instance."""

    def __init__(
        self, status: int, message: str, *, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code


class ClientGoneError(Exception):
    """The client closed its connection: an answer would reach no one."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it goes over the wire."""

    status: int
    message: str
    code: str
    param: str | None = None
    timing: EngineTiming | None = None  # of the request, if it began and asked for it

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "internal_server_error"
        )

    def encode(self) -> bytes:
        """Return ``{"error": {...}}`` as JSON."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        body: dict[str, object] = {"error": error}
        if self.timing is not None:
            body["timing"] = ChoiceTiming.of(self.timing)
        return msgspec.json.encode(body)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_reply(exc: BaseException) -> ErrorReply:
    """Describe ``exc`` to the client. Exceptions that are our bugs are logged, not shown."""
    if isinstance(exc, RequestError):
        param = "model" if exc.param == "lora_request" else exc.param  # HTTP's name for it
        return ErrorReply(exc.status, str(exc), exc.code, param)
    if isinstance(exc, AdapterError):
        return ErrorReply(400, str(exc), "adapter_refused")
    if isinstance(exc, EngineDeadError):
        return ErrorReply(503, str(exc), "engine_dead")
    if isinstance(exc, CorunError):
        return ErrorReply(500, str(exc), "internal_error")
    _logger.error("A request failed unexpectedly", exc_info=exc)
    return ErrorReply(500, _INTERNAL_MESSAGE, "internal_error")


def error_response(exc: BaseException) -> Response:
    """Return the HTTP response for ``exc``."""
    return response_of(error_reply(exc))


def response_of(reply: ErrorReply) -> Response:
    """Return ``reply`` as an HTTP response with the headers that its status calls for."""
    headers = {}
    if reply.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if reply.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if reply.status == 413 or reply.code == SHUTTING_DOWN:
        headers["Connection"] = "close"
    return Response(
        reply.encode(), status_code=reply.status, headers=headers, media_type="application/json"
    )


def routing_error(exc: HTTPException, *, method: str, path: str) -> Response:
    """Return the response for what Starlette's router refuses: unknown paths and methods."""
    allowed = (exc.headers or {}).get("Allow", "")
    if exc.status_code == 404:
        reply = ErrorReply(404, f"there is no endpoint {path}", "unknown_url")
    elif exc.status_code == 405:
        reply = ErrorReply(405, f"{path} takes {allowed}, not {method}", "method_not_allowed")
    else:
        reply = ErrorReply(exc.status_code, exc.detail, "invalid_request")
    response = response_of(reply)
    for name, value in (exc.headers or {}).items():
        response.headers[name] = value
    return response
