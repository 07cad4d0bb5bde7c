"""``x-request-id``: the id of a request, from its client or from the server."""

import re
import uuid
from collections.abc import Mapping
from typing import Any

HEADER = b"x-request-id"
# A client's id must be safe in headers, logs and JSON.
_GIVEN = re.compile(rb"[\x21-\x7e]{1,128}")


def new_id() -> str:
    """Return a new id."""
    return uuid.uuid4().hex


def given_id(scope: Mapping[str, Any]) -> str | None:
    """Return the client's id, if it sent a valid one."""
    for name, value in scope["headers"]:
        if name == HEADER and _GIVEN.fullmatch(value):
            return str(value.decode())
    return None


def answer_id(prefix: str, given: str | None) -> str:
    """Return the id of an answer. It is unique, even if the client repeats its own."""
    return f"{prefix}-{new_id()}" if given is None else f"{prefix}-{given}-{new_id()[:8]}"
