"""Reading a request's body: its limits, JSON, fields, validation into a model.

Limits (``HttpLimits``) are checked before items are looked at, their types later. Reports every
fault as one message with the offending field.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, ClassVar, Self, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import Receive, Scope

from ..errors import OverloadedError, RequestError
from ..limits import (
    HttpLimits,
    check_bad_words,
    check_num_biases,
    check_num_detokenized,
    check_num_ids,
    check_stops,
)
from .errors import ClientGoneError, HttpError
from .fields import ACCEPTED_FIELDS, REFUSED_FIELDS, FieldTable, RefusedField, UnknownFields
from .json_values import field_path, kind_of, wrong_type

_MAX_NAME_CHARS = 16_384  # of a name, path or salt
_CHUNK_BYTES = 1 << 16


def check_num_items(body: bytes, max_json_items: int) -> None:
    """Raise ``RequestError`` if the arrays and objects of a body have too many items.

    The names in objects are items, too: a parser needs as long for them. The JSON is not parsed,
    and need not be valid. Nothing here runs for more than a few milliseconds without letting other
    threads run.
    """
    if len(body) <= max_json_items:  # usual case: an item has a byte at least
        return
    num_items, start, is_text = 0, 0, False
    while start < len(body):
        chunk = _chunk(body, start)
        start += len(chunk)
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0
        num_items += sum(map(outside.count, (b",", b"[", b"{", b":")))
        if num_items > max_json_items:
            raise RequestError(
                f"the arrays and objects of the body have more than {max_json_items} values "
                "and names (--max-json-items)"
            )


def _chunk(body: bytes, start: int) -> bytes:
    """Return a part of ``body`` that does not end between a backslash and what it escapes."""
    chunk = body[start : start + _CHUNK_BYTES]
    num_backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
    return chunk if num_backslashes % 2 == 0 else body[start : start + _CHUNK_BYTES + 1]


def check_body(data: dict[str, Any], limits: HttpLimits) -> None:
    """Raise ``RequestError`` for a body that is too deep, or in which a field is too large.

    This is checked before items of the fields are looked at, which is slow.
    """
    level: list[Any] = [data]
    for _ in range(limits.max_json_depth):
        level = [item for one in level for item in _containers(one)]
        if not level:
            break
    if level:
        raise RequestError(
            f"the body is more than {limits.max_json_depth} objects and arrays deep (--max-json-depth)"
        )
    check_fields(data, limits)


def check_fields(data: dict[str, Any], limits: HttpLimits) -> None:
    """Raise ``RequestError`` if a field of a body is too large."""
    for name, check in _FIELD_CHECKS.items():
        value = data.get(name)
        if value is not None:
            check(name, value, limits)


def _check_messages(name: str, value: object, limits: HttpLimits) -> None:
    if not isinstance(value, list):
        return
    if len(value) > limits.max_messages:
        raise RequestError(
            f"{name} has {len(value)} items, at most {limits.max_messages} are served (--max-messages)",
            param=name,
        )
    num_parts = sum(
        len(field)
        for message in value
        if isinstance(message, dict)
        for field in map(message.get, ("content", "tool_calls", "output"))
        if isinstance(field, list)
    )
    if num_parts > limits.max_content_parts:
        raise RequestError(
            f"{name} has {num_parts} content parts and tool calls, at most "
            f"{limits.max_content_parts} are served (--max-content-parts)",
            param=name,
        )


def _check_biases(name: str, value: object, limits: HttpLimits) -> None:
    if isinstance(value, dict):
        check_num_biases(len(value), limits.max_logit_bias)


def _check_stops(name: str, value: object, limits: HttpLimits) -> None:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list):
        check_stops(stops, max_stop_strings=limits.max_stop_strings, max_stop_bytes=limits.max_stop_bytes)


def _check_bad_words(name: str, value: object, limits: HttpLimits) -> None:
    if isinstance(value, list):
        check_bad_words(value, max_bad_words_bytes=limits.max_bad_words_bytes)


def _check_ids(name: str, value: object, limits: HttpLimits) -> None:
    if isinstance(value, list):
        check_num_ids(name, len(value), limits.vocab_size)


def _check_detokenized(name: str, value: object, limits: HttpLimits) -> None:
    if isinstance(value, list):
        check_num_detokenized(len(value), limits.max_tokenize_tokens)


def _check_name(name: str, value: object, limits: HttpLimits) -> None:
    if isinstance(value, str) and len(value) > _MAX_NAME_CHARS:
        raise RequestError(
            f"{name} has {len(value)} characters, at most {_MAX_NAME_CHARS} are served", param=name
        )


_FIELD_CHECKS: Mapping[str, Callable[[str, object, HttpLimits], None]] = {
    **dict.fromkeys(("messages", "input"), _check_messages),
    "logit_bias": _check_biases,
    "stop": _check_stops,
    "bad_words": _check_bad_words,
    **dict.fromkeys(("allowed_token_ids", "stop_token_ids"), _check_ids),
    "tokens": _check_detokenized,
    **dict.fromkeys(("model", "cache_salt", "lora_name", "lora_path"), _check_name),
}


def _containers(value: Any) -> list[Any]:
    """Return the objects and arrays in an object or array."""
    items = value.values() if isinstance(value, dict) else value
    if not {dict, list} & set(map(type, items)):  # a prompt may be millions of tokens
        return []
    return [item for item in items if isinstance(item, dict | list)]


_MAX_INLINE_BYTES = 1 << 16  # of a body that the event loop parses itself
# One thread: several would only take the interpreter's lock from each other.
_pool = ThreadPoolExecutor(1, thread_name_prefix="request-bodies")
_DISCARD_FACTOR = 4  # an oversized body is read (and dropped) up to this many times the limit


class RequestModel(BaseModel):
    """Base of all bodies: exact types, finite numbers; null always means "not given"."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    nested: ClassVar[Mapping[str, FieldTable]] = {}  # of the objects in it, by field
    # Beside those that all routes accept or refuse.
    accepted: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, RefusedField]] = {}

    @classmethod
    @cache
    def field_table(cls) -> FieldTable:
        """Return the table of its fields, those of nested objects included."""
        return FieldTable(
            served=tuple(cls.model_fields),
            accepted={**ACCEPTED_FIELDS, **cls.accepted},
            refused={**REFUSED_FIELDS, **cls.refused},
            nested=cls.nested,
        )


def given(description: str) -> Any:
    """Return an optional field. ``description``: for the documentation."""
    return Field(default=None, description=description)


ModelT = TypeVar("ModelT", bound=RequestModel)
_Read = TypeVar("_Read")


class BodyRoom:
    """The memory for bodies that are received or parsed, of one server."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # in use


class HeldBody:
    """The room that one body takes until it is released.

    The only body has room in any case. So has a short one: a few clients that send large bodies
    slowly must not shut out others.
    """

    __slots__ = ("_is_refused", "_num_bytes", "_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._num_bytes = 0
        self._is_refused = False

    def add(self, num_bytes: int) -> bool:
        """Take room for a part of the body, if all parts so far have room; return whether."""
        room = self._room
        has_others = room.num_bytes > self._num_bytes
        is_short = self._num_bytes + num_bytes <= _MAX_INLINE_BYTES
        if has_others and not is_short and room.num_bytes + num_bytes > room.max_bytes:
            self._is_refused = True
        if not self._is_refused:
            room.num_bytes += num_bytes
            self._num_bytes += num_bytes
        return not self._is_refused

    def check(self) -> None:
        """Raise ``OverloadedError`` if a part of the body had no room."""
        if self._is_refused:
            raise OverloadedError(
                "the bodies of this and other requests that are being received exceed "
                f"{self._room.max_bytes} bytes together (--max-bodies-mib)"
            )

    def release(self) -> None:
        """Give its room back. Idempotent."""
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


async def read_body(scope: Scope, receive: Receive, max_bytes: int, held: HeldBody | None = None) -> bytes:
    """Return the whole body, which takes room in ``held``, if that is given.

    Raises ``HttpError`` 413 beyond ``max_bytes``, ``OverloadedError`` if too many large bodies are
    received at once, and ``ClientGoneError`` if the client leaves.
    """
    headers = dict(scope["headers"])
    declared = _declared_length(headers)
    if declared is not None and declared > max_bytes and b"expect" in headers:
        raise _too_large(declared, max_bytes)
    held = held or HeldBody(BodyRoom(max_bytes))
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes <= max_bytes and held.add(len(chunk)):
            chunks.append(chunk)
        elif num_bytes > max_bytes * _DISCARD_FACTOR:
            break
        if not message.get("more_body", False):
            break
    if num_bytes > max_bytes:
        # An answer before the client has sent everything would reach it as a reset connection.
        raise _too_large(num_bytes if declared is None else declared, max_bytes)
    held.check()
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _declared_length(headers: Mapping[bytes, bytes]) -> int | None:
    value = headers.get(b"content-length", b"")
    return int(value) if value.isdigit() else None


def _too_large(num_bytes: int, max_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"the body has {num_bytes} bytes or more, at most {max_bytes} are accepted (--max-body-mib)",
        code="body_too_large",
    )


async def parse_body(model: type[ModelT], body: bytes, unknown: UnknownFields) -> ModelT:
    """Decode and validate ``body``. Raises ``RequestError`` (400) that names the field.

    A large one is parsed in a thread, so that the event loop goes on.
    """
    return await read_beside(body, partial(_parse, model, body, unknown))


async def read_beside(body: bytes, read: Callable[[], _Read]) -> _Read:
    """Return the result of ``read``, which a thread calls if ``body`` is large."""
    if not is_large(body):  # usual case
        return read()
    return await asyncio.get_running_loop().run_in_executor(_pool, read)


def is_large(body: bytes) -> bool:
    """Whether the event loop leaves a body, and the conversation in it, to a thread."""
    return len(body) > _MAX_INLINE_BYTES


def _parse(model: type[ModelT], body: bytes, unknown: UnknownFields) -> ModelT:
    check_num_items(body, unknown.limits.max_json_items)
    data = _decode_object(body)
    check_body(data, unknown.limits)
    unknown.sift(data, model.field_table())
    return read_model(model, data)


def read_model(model: type[ModelT], data: Mapping[str, Any]) -> ModelT:
    """Validate fields that are all served. Raises ``HttpError`` (400) that names the field."""
    try:
        return model.model_validate(data)
    except ValidationError as exc:
        raise _describe(exc) from None


def _decode_object(body: bytes) -> dict[str, Any]:
    if not body or body.isspace():
        raise HttpError(400, "the body is empty, a JSON object is expected", code="invalid_json")
    try:
        data = pydantic_core.from_json(body)
    except ValueError as exc:
        raise HttpError(400, f"the body is {_json_fault(body, exc)}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise HttpError(400, f"the body is {kind_of(data)}, a JSON object is expected", code="invalid_json")
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
