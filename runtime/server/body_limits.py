"""Limits of a request's body, which are checked before its items are looked at. Pure.

The values are those of ``HttpLimits``. Whether an item has the right type is checked later.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import RequestError
from ..limits import (
    HttpLimits,
    check_bad_words,
    check_num_biases,
    check_num_detokenized,
    check_num_ids,
    check_stops,
)

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
