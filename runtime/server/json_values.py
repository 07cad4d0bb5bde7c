"""How error messages write paths, values and types of a body."""

import math

import msgspec

from .errors import HttpError

MAX_SHOWN_CHARS = 60  # of a value quoted in a message


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
    """Quote ``value`` as JSON, shortened. Looks at its beginning only."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN_CHARS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, int):
        return "true" if value is True else "false" if value is False else str(value)
    text = msgspec.json.encode(_beginning(value, [MAX_SHOWN_CHARS]), enc_hook=str).decode()
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def _beginning(value: object, left: list[int]) -> object:
    """Return the part of ``value`` that is shown: an item takes a character at least.

    ``left``: the number of items that can still be shown.
    """
    if isinstance(value, str):
        return value[: MAX_SHOWN_CHARS + 1]
    if not isinstance(value, list | dict):
        return value
    items: list[tuple[object, object]] = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if left[0] <= 0:
            break
        left[0] -= 1
        items.append((_beginning(key, left), _beginning(item, left)))
    return dict(items) if isinstance(value, dict) else [item for _, item in items]


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
    """Return the error for a ``value`` that is not ``wanted`` (a noun with its article)."""
    return HttpError(
        400, f"{path} is {show(value)} ({kind_of(value)}), must be {wanted}", code="invalid_type", param=path
    )
