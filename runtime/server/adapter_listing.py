"""Adapters as ``GET /v1/lora_adapters`` shows them: pages, filters, and the JSON of each."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..adapters.conventions import NO_CONVENTIONS, AdapterConventions
from ..adapters.info import LEVEL_ALIASES, LEVELS, AdapterInfo, DrainingVersion
from ..engine_state import Residency
from .errors import InvalidValueError

MAX_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """The adapters that a request selects."""

    limit: int = MAX_PAGE
    after: str | None = None  # a name, registered or not
    level: str | None = None  # only adapters at this level

    def of(self, adapters: Sequence[AdapterInfo]) -> tuple[list[AdapterInfo], bool]:
        """Return them by name, and whether there are more."""
        wanted = [
            one
            for one in sorted(adapters, key=lambda one: one.name)
            if (self.after is None or one.name > self.after) and self.level in (None, one.residency.level)
        ]
        return wanted[: self.limit], len(wanted) > self.limit


def parse_page(query: Mapping[str, str]) -> Page:
    """Read ``limit``, ``after`` and ``level``; raises ``HttpError`` for an invalid value."""
    unknown = sorted(set(query) - {"limit", "after", "level"})
    if unknown:
        raise InvalidValueError(f"unknown parameter {unknown[0]!r}; known: limit, after, level", unknown[0])
    limit = query.get("limit", str(MAX_PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise InvalidValueError(f"limit is {limit!r}, expected 1 to {MAX_PAGE}", "limit")
    level = query.get("level")
    if level is not None:
        level = LEVEL_ALIASES.get(level, level)
        if level not in LEVELS:
            raise InvalidValueError(f"unknown level {level!r}; choose one of {', '.join(LEVELS)}", "level")
    return Page(int(limit), query.get("after"), level)


def adapter_json(adapter: AdapterInfo) -> dict[str, Any]:
    """Return all fields of an adapter."""
    fields = msgspec.structs.asdict(adapter)
    residency, draining = fields.pop("residency"), fields.pop("draining")
    conventions: AdapterConventions = fields.pop("conventions") or NO_CONVENTIONS
    versions = [
        {"version": one.version, "rank": one.rank, "num_bytes": one.num_bytes}
        | _residency_json(one.residency)
        for one in draining
    ]
    is_resident = {"resident": adapter.is_resident}
    shown = {"conventions": conventions.digest, "messages_refused": conventions.refusal}
    return fields | shown | is_resident | _residency_json(residency) | {"draining": versions}


class LoadCounts(msgspec.Struct, frozen=True):
    """How often a version was loaded from one level to the next, and how long that took."""

    num_loads: int
    seconds: float


def _types_of(struct: type[msgspec.Struct], *, without: Collection[str] = ()) -> dict[str, Any]:
    return {one.name: one.type for one in msgspec.structs.fields(struct) if one.name not in without}


_RESIDENCY = _types_of(Residency) | {"loads": dict[str, LoadCounts]}
_DRAINING: Any = msgspec.defstruct(
    "DrainingCard", list((_types_of(DrainingVersion, without=["residency"]) | _RESIDENCY).items())
)
# The type of what ``adapter_json`` returns, for the documentation.
AdapterCard: Any = msgspec.defstruct(
    "AdapterCard",
    list(
        (
            _types_of(AdapterInfo, without=["residency", "conventions"])
            | _RESIDENCY
            | {"conventions": str, "messages_refused": str | None}
            | {"resident": bool, "draining": list[_DRAINING]}
        ).items()
    ),
)


def _residency_json(residency: Residency) -> dict[str, Any]:
    fields = msgspec.structs.asdict(residency)
    fields["loads"] = {
        transition: {"num_loads": number, "seconds": round(seconds, 6)}
        for transition, (number, seconds) in residency.loads.items()
    }
    return fields
