"""``x-request-id``: what a request is called, by its client or by the server."""

import re
import uuid
from collections.abc import Mapping
from typing import Any

HEADER = b"x-request-id"
# Of a client's own: what may stand in headers, logs and JSON as it is.
_GIVEN = re.compile(rb"[\x21-\x7e]{1,128}")


def new_id() -> str:
    """Return one of the server's own."""
    return uuid.uuid4().hex


def given_id(scope: Mapping[str, Any]) -> str | None:
    """Return the client's own, if it sent one that can be used."""
    for name, value in scope["headers"]:
        if name == HEADER and _GIVEN.fullmatch(value):
            return str(value.decode())
    return None


def answer_id(prefix: str, given: str | None) -> str:
    """Return the id of an answer: no two are the same, even if their clients' are."""
    return f"{prefix}-{new_id()}" if given is None else f"{prefix}-{given}-{new_id()[:8]}"
