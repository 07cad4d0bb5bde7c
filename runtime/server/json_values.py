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
    """Return the error for a ``value`` that is not ``wanted`` (a noun with its article)."""
    return HttpError(
        400,
        f"{path} is {show(value)} ({kind_of(value)}), must be {wanted}",
        code="invalid_type",
        param=path,
    )
