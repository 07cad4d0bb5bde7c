"""Reading a request's body: size limit, JSON, fields that are not served, validation into a model.

Turns every fault of the bytes into one clear message with the offending field.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.types import Receive, Scope

from ..errors import NotServedError
from ..near_names import near_names
from .errors import ClientGoneError, HttpError

MAX_SHOWN_CHARS = 60  # of a value quoted in a message
_DISCARD_FACTOR = 4  # an oversized body is read (and dropped) up to this many times the limit


class RequestModel(BaseModel):
    """Base of all bodies: exact types, finite numbers, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


ModelT = TypeVar("ModelT", bound=RequestModel)


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body.

    Raises ``HttpError`` 413 beyond ``max_bytes`` and ``ClientGoneError`` if the client leaves.
    """
    headers = dict(scope["headers"])
    declared = _declared_length(headers)
    if declared is not None and declared > max_bytes and b"expect" in headers:
        raise _too_large(declared, max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            chunks.append(chunk)
        elif num_bytes > max_bytes * _DISCARD_FACTOR:
            break
        if not message.get("more_body", False):
            break
    if num_bytes > max_bytes:
        # Answering before the client has sent everything would make it see a reset connection.
        raise _too_large(num_bytes if declared is None else declared, max_bytes)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _declared_length(headers: Mapping[bytes, bytes]) -> int | None:
    value = headers.get(b"content-length", b"")
    return int(value) if value.isdigit() else None


def _too_large(num_bytes: int, max_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"the body has {num_bytes} bytes or more, at most {max_bytes} are accepted "
        "(--max-body-mib)",
        code="body_too_large",
    )


def parse_body(model: type[ModelT], body: bytes) -> ModelT:
    """Decode and validate ``body``. Raises ``RequestError`` (400) that names the field."""
    data = _decode_object(body)
    _drop_unsupported(data, model.model_fields)
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise _describe(exc, model) from None


def _decode_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise HttpError(400, "the body is empty, a JSON object is expected", code="invalid_json")
    try:
        data = pydantic_core.from_json(body)
    except ValueError as exc:
        raise HttpError(400, f"the body is {_json_fault(body, exc)}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise HttpError(
            400, f"the body is {kind_of(data)}, a JSON object is expected", code="invalid_json"
        )
    return data


def _json_fault(body: bytes, exc: ValueError) -> str:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as bad:
        return f"not valid UTF-8: byte 0x{body[bad.start]:02x} at offset {bad.start}"
    return f"not valid JSON: {exc}"


def _describe(exc: ValidationError, model: type[RequestModel]) -> HttpError:
    """Turn pydantic's list of findings into one message about the first of them."""
    finding = exc.errors(include_url=False, include_context=False)[0]
    param = field_path(finding["loc"])
    kind = finding["type"]
    if kind == "extra_forbidden":
        hint = near_names(str(finding["loc"][-1]), model.model_fields)
        message = f"{show(param)} is not a field that is served here{hint}"
        return HttpError(400, message, code="unknown_field", param=param)
    if kind == "missing":
        return HttpError(400, f"{param} is missing", code="missing_field", param=param)
    wanted = finding["msg"].removeprefix("Input should be ")
    return wrong_type(param, finding["input"], wanted)


def field_path(location: tuple[int | str, ...]) -> str:
    """Write a location as clients write it: ``messages[0].content``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path[:MAX_SHOWN_CHARS]


def show(value: object) -> str:
    """Quote ``value`` as JSON, shortened."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN_CHARS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, int):
        return "true" if value is True else "false" if value is False else str(value)
    text = msgspec.json.encode(value, enc_hook=str).decode()
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def kind_of(value: object) -> str:
    """Name the JSON type of ``value`` with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def wrong_type(path: str, value: object, wanted: str) -> HttpError:
    """Return the error for a ``value`` that is not ``wanted``, which comes with its article."""
    return HttpError(
        400,
        f"{path} is {show(value)} ({kind_of(value)}), must be {wanted}",
        code="invalid_type",
        param=path,
    )


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """A field of OpenAI's API or of its relatives that corun does not serve."""

    reason: str
    neutral: tuple[object, ...] = ()  # values, besides null, that ask for nothing


_NO_TOOLS = "calling tools and functions is not served"
_NO_SOUND = "only text is served"
_NO_CONSTRAINTS = "constrained decoding is not served"
_NO_STORE = "completions are not stored"
_NO_REASONING = "the effort of a model cannot be set"

_UNSUPPORTED_FIELDS: Mapping[str, _Unsupported] = {
    "tools": _Unsupported(_NO_TOOLS, ([],)),
    "tool_choice": _Unsupported(_NO_TOOLS, ("none",)),
    "parallel_tool_calls": _Unsupported(_NO_TOOLS, (True, False)),
    "functions": _Unsupported(_NO_TOOLS, ([],)),
    "function_call": _Unsupported(_NO_TOOLS, ("none",)),
    "response_format": _Unsupported(_NO_CONSTRAINTS, ({"type": "text"},)),
    "structured_outputs": _Unsupported(_NO_CONSTRAINTS),
    "guided_json": _Unsupported(_NO_CONSTRAINTS),
    "guided_regex": _Unsupported(_NO_CONSTRAINTS),
    "guided_choice": _Unsupported(_NO_CONSTRAINTS),
    "guided_grammar": _Unsupported(_NO_CONSTRAINTS),
    "best_of": _Unsupported("all choices are returned, none are ranked", (1,)),
    "use_beam_search": _Unsupported("beam search is not served", (False,)),
    "suffix": _Unsupported("filling in the middle is not served", ("",)),
    "logit_bias": _Unsupported("biasing single tokens is not served", ({},)),
    "prompt_logprobs": _Unsupported("log-probabilities of the prompt are not served"),
    "audio": _Unsupported(_NO_SOUND),
    "modalities": _Unsupported(_NO_SOUND, (["text"],)),
    "prediction": _Unsupported("predicted outputs are not served"),
    "reasoning_effort": _Unsupported(_NO_REASONING),
    "verbosity": _Unsupported(_NO_REASONING),
    "web_search_options": _Unsupported("searching the web is not served"),
    "store": _Unsupported(_NO_STORE, (False,)),
    "metadata": _Unsupported(_NO_STORE, ({},)),
    "service_tier": _Unsupported("there is one tier of service", ("auto", "default")),
    "chat_template": _Unsupported("templates come with the model or with --chat-template"),
    "priority": _Unsupported("requests have no priorities", (0,)),
}


def _drop_unsupported(data: dict[str, Any], served: Collection[str]) -> None:
    """Remove unsupported fields that ask for nothing from ``data``.

    Raises ``NotServedError`` for the first one that asks for something. It is never ignored: a
    client that asked for a tool call must not get prose that looks like an answer.
    """
    for name in [name for name in data if name in _UNSUPPORTED_FIELDS and name not in served]:
        entry = _UNSUPPORTED_FIELDS[name]
        if data[name] is not None and not _is_neutral(data[name], entry.neutral):
            raise NotServedError(
                f"{name} is not served: {entry.reason}{_allowed(entry.neutral)}", param=name
            )
        del data[name]


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Compare with the type, so that true does not pass for 1."""
    return any(type(value) is type(other) and value == other for other in neutral)


def _allowed(neutral: tuple[object, ...]) -> str:
    shown = [repr(value).replace("'", '"') for value in neutral if not isinstance(value, bool)]
    return f" (only {' or '.join(shown)} is accepted)" if shown else ""
