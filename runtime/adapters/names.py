"""Rules for names of adapters, and the errors for names that cannot be used.

Used by the engine's registry and by the front end's copy of it. Pure.
"""

from collections.abc import Iterable

from ..errors import (
    AdapterError,
    AdapterExistsError,
    AdapterFailedError,
    AdapterUnavailableError,
    UnknownModelError,
)
from ..near_names import near_names

LOADING = "loading"
READY = "ready"
DRAINING = "draining"
FAILED = "failed"

_MAX_NAME_LENGTH = 256
_MAX_CHARS_SHOWN = 100
_MAX_NAMES_SHOWN = 5
_STATE_PHRASES = {LOADING: "is loading", DRAINING: "is draining: it was removed", FAILED: "failed to load"}


def check_adapter_name(name: str, base_names: Iterable[str] = ()) -> None:
    """Raise ``AdapterError`` unless ``name`` is valid for an adapter.

    One rule for HTTP, options and directories: parts joined by single slashes.
    """
    reason = None
    if not name or name != name.strip():
        reason = "is empty or begins or ends with a space"
    elif len(name) > _MAX_NAME_LENGTH:
        reason = f"has {len(name)} characters; the limit is {_MAX_NAME_LENGTH}"
    elif any(character in "\\:" for character in name):
        reason = "contains a backslash or a colon"
    elif any(part in ("", ".", "..") for part in name.split("/")):
        reason = "has an empty part, '.' or '..' between its slashes"
    elif not name.isprintable():
        reason = "contains a control character"
    elif name in base_names:
        reason = "is the name of the base model"
    if reason is not None:
        shown = repr(name if len(name) <= _MAX_NAME_LENGTH else name[:40] + "...")
        raise AdapterError(f"an adapter cannot be called {shown}: the name {reason}")


def unknown_name(
    name: str, known: Iterable[str], *, meant: str | None = None, param: str = "lora_request"
) -> UnknownModelError:
    """Return the error for a name that is not among ``known``, with suggestions.

    ``meant``: the part of the name to compare; None = all of it.
    """
    known = list(known)
    shown = name if len(name) <= _MAX_CHARS_SHOWN else name[: _MAX_CHARS_SHOWN - 1] + "…"
    hint = near_names(meant or name, known, cutoff=0.5)
    if not hint and known:
        hint = "; served are " + ", ".join(map(repr, known[:_MAX_NAMES_SHOWN]))
        num_more = len(known) - _MAX_NAMES_SHOWN
        hint += f" and {num_more} more" if num_more > 0 else ""
    return UnknownModelError(f"no model or adapter is named {shown!r}{hint}", param=param)


def unavailable_adapter(
    name: str, state: str, reason: str | None, *, param: str = "lora_request"
) -> AdapterUnavailableError:
    """Return the error for a registered adapter that cannot be used now."""
    because = f": {reason}" if reason and state == FAILED else ""
    kind = AdapterFailedError if state == FAILED else AdapterUnavailableError
    return kind(f"adapter {name!r} {_STATE_PHRASES[state]}{because}", param=param)


def taken_name(name: str) -> AdapterExistsError:
    """Return the error for a name that has other content and must not be replaced."""
    return AdapterExistsError(
        f"the adapter {name!r} is already loaded with other content; "
        "set load_inplace to replace it with a new version",
        param="lora_name",
    )
