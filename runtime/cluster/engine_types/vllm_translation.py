"""Translates requests and answers for vLLM: the model's name and errors. Pure."""

import re

import msgspec

from ...errors import ContextLengthError, InvalidKeyError, RequestError, UnknownModelError
from ...server.errors import ErrorReply, HttpError
from ..http.calls import UnreachableError

_ERROR_EVENT = re.compile(rb'data: (\{"(?:error|object":"error)"[^\n]*\})')
_TOO_LONG = re.compile("maximum context length|greater than max_model_len")
_MAX_CHARS_SHOWN = 1000
_CODES = {
    400: "invalid_value",
    401: InvalidKeyError.code,
    403: InvalidKeyError.code,
    404: UnknownModelError.code,
    405: "method_not_allowed",
    413: "body_too_large",
    422: "invalid_value",
    429: "overloaded",
    503: "engine_dead",
}


class _Error(msgspec.Struct, frozen=True):
    """An error of vLLM: ``code`` is the status; before 0.10 its fields were the body's own."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _Body(msgspec.Struct, frozen=True):
    error: _Error | str | None = None
    message: str = ""
    detail: msgspec.Raw = msgspec.Raw()


class VllmTranslation:
    """The ``Translation`` of one request."""

    def __init__(self, model: str | None, asked: str | None) -> None:
        """``model``: the name at vLLM; ``asked``: the client's name; None = keep the name."""
        self._model = None if model is None else msgspec.json.encode(model)
        self._model_field = None if self._model is None else b'"model":' + self._model
        self._asked = None if asked is None else msgspec.json.encode(asked)

    def body(self, body: bytes) -> bytes:
        """Return the body with vLLM's name of the model; vLLM refuses one that is not JSON."""
        if self._model is None:
            return body
        return _with_model(body, self._model)

    def events(self, data: bytes) -> bytes:
        """Return events with the client's name of the model; quotes in text are escaped."""
        if self._model_field is not None and self._asked is not None:
            data = data.replace(self._model_field, b'"model":' + self._asked)
        if b'"error"' in data:
            data = _ERROR_EVENT.sub(lambda found: b"data: " + _translated(0, found[1]), data)
        return data

    def answer(self, status: int, body: bytes) -> bytes:
        if status >= 400:
            return _translated(status, body)
        if self._asked is None or self._model_field is None or self._model_field not in body:
            return body
        return _with_model(body, self._asked)


def vllm_refusal(url: str, status: int, body: bytes) -> HttpError:
    """Return the error of a failed call to vLLM."""
    reply = _reply(status, body)
    if reply is None:
        return UnreachableError(f"{url} answers {status}, with an error that is not vLLM's")
    if status in (401, 403):
        text = f"{url} does not take the cluster's key as its --api-key"
        return HttpError(502, text, code="engine_refused")
    return HttpError(reply.status, reply.message, code=reply.code, param=reply.param)


def _translated(status: int, body: bytes) -> bytes:
    reply = _reply(status, body)
    if reply is None:
        status = status or 500
        reply = ErrorReply(status, "the engine's answer is no error of vLLM", _code(status))
    return reply.encode()


def _reply(status: int, body: bytes) -> ErrorReply | None:
    """Translate an error of vLLM; None if it is none. ``status`` 0: take it from the body."""
    try:
        reply = msgspec.json.decode(body, type=_Body)
    except msgspec.DecodeError:
        return None
    error = reply.error if isinstance(reply.error, _Error) else _Error(message=reply.message)
    message = error.message or (reply.error if isinstance(reply.error, str) else "")
    if not message and reply.detail:
        message = bytes(reply.detail).decode(errors="replace").strip('"')
    if not message:
        return None
    if not status:
        status = error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500
    code = ContextLengthError.code if _TOO_LONG.search(message) else _code(status)
    text = " ".join(message.split())[:_MAX_CHARS_SHOWN]
    return ErrorReply(status, text, code, (error.param or "").removeprefix("body.") or None)


def _code(status: int) -> str:
    fallback = "internal_error" if status >= 500 else RequestError.code
    return _CODES.get(status, fallback)


def _with_model(body: bytes, model: bytes) -> bytes:
    """Return a JSON object with another model; all else is unchanged. O(bytes)."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return body
    fields["model"] = msgspec.Raw(model)
    return msgspec.json.encode(fields)
