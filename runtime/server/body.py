"""Reading a request's body: size limit, JSON, fields, validation into a model.

Reports every fault as one message with the offending field.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import Receive, Scope

from .errors import ClientGoneError, HttpError
from .fields import ACCEPTED_FIELDS, REFUSED_FIELDS, FieldTable, UnknownFields
from .json_values import field_path, kind_of, wrong_type

_DISCARD_FACTOR = 4  # an oversized body is read (and dropped) up to this many times the limit


class RequestModel(BaseModel):
    """Base of all bodies: exact types, finite numbers; null always means "not given"."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    nested: ClassVar[Mapping[str, FieldTable]] = {}  # of the objects in it, by field

    @classmethod
    @cache
    def field_table(cls) -> FieldTable:
        """Return the table of its fields, those of nested objects included."""
        return FieldTable(
            served=tuple(cls.model_fields),
            accepted=ACCEPTED_FIELDS,
            refused=REFUSED_FIELDS,
            nested=cls.nested,
        )


def given(description: str) -> Any:
    """Return an optional field. ``description``: for the documentation."""
    return Field(default=None, description=description)


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
        # An answer before the client has sent everything would reach it as a reset connection.
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


def parse_body(model: type[ModelT], body: bytes, unknown: UnknownFields) -> ModelT:
    """Decode and validate ``body``. Raises ``RequestError`` (400) that names the field."""
    data = _decode_object(body)
    unknown.sift(data, model.field_table())
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise _describe(exc) from None


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


def _describe(exc: ValidationError) -> HttpError:
    """Return an error about the first of pydantic's findings."""
    finding = exc.errors(include_url=False, include_context=False)[0]
    param = field_path(finding["loc"])
    if finding["type"] == "missing":
        return HttpError(400, f"{param} is missing", code="missing_field", param=param)
    wanted = finding["msg"].removeprefix("Input should be ")
    return wrong_type(param, finding["input"], wanted)
