"""Reading a request's body: size limit, JSON, and validation into a model.

Turns every fault of the bytes into one clear message with the offending field. Knows nothing of
what the fields mean.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.types import Receive, Scope

from ..near_names import near_names
from .errors import ClientGoneError, HttpError
from .refusals import refuse_not_served

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
    refuse_not_served(data, model.model_fields)
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
    kind, value = finding["type"], finding["input"]
    if kind == "extra_forbidden":
        hint = near_names(str(finding["loc"][-1]), model.model_fields)
        message = f"{show(param)} is not a field that is served here{hint}"
        return HttpError(400, message, code="unknown_field", param=param)
    if kind == "missing":
        return HttpError(400, f"{param} is missing", code="missing_field", param=param)
    wanted = finding["msg"].removeprefix("Input should be ")
    message = f"{param} is {show(value)} ({kind_of(value)}), must be {wanted}"
    return HttpError(400, message, code="invalid_type", param=param)


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
