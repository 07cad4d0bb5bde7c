"""Reads a log of requests, one JSON object per line: arrivals, adapters, lengths, sessions."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..near_names import near_names
from .draw_inputs import DrawInputs, Drawn, TraceError
from .draws import scaled
from .popularity import with_drawn_ranks
from .workload_spec import WorkloadSpec

_NEEDED = ("arrival_s", "model", "prompt_tokens", "output_tokens")
_FIELDS = (*_NEEDED, "session", "rank")
_TOO_MANY = 2**31


def draw_json_lines(spec: WorkloadSpec, inputs: DrawInputs) -> Drawn:
    """All or the first requests of ``spec.json_lines``, on their clock or scaled to a rate.

    A line has ``arrival_s``, ``model`` (the adapter), ``prompt_tokens`` and ``output_tokens``, and
    may have ``session`` and ``rank``. Adapters without a rank get those of ``spec.adapters``.

    Raises ``TraceError`` with file and line.
    """
    assert spec.json_lines is not None
    path = Path(spec.json_lines)
    rows = _read(path)[: spec.requests]
    arrival_s = np.array([row["arrival_s"] for row in rows], dtype=np.float64)
    arrival_s -= arrival_s[0]
    if spec.rps is not None:
        arrival_s = scaled(arrival_s, inputs)
    if spec.duration_s is not None:
        arrival_s = arrival_s[arrival_s < spec.duration_s]
        rows = rows[: len(arrival_s)]
    names, who = np.unique([row["model"] for row in rows], return_inverse=True)
    adapters, ranks = with_drawn_ranks(who, inputs, spec.adapters.ranks)
    output = np.array([row["output_tokens"] for row in rows])
    drawn = Drawn(
        arrival_s,
        np.array([row["prompt_tokens"] for row in rows]),
        output,
        adapters,
        _with_known_ranks(path, ranks, names.tolist(), rows),
        float(np.quantile(output, 0.99)),
        names=tuple(names.tolist()),
    )
    if not any("session" in row for row in rows):
        return drawn
    # A request without a session has one of its own.
    known = [
        f"of {row['session']}" if "session" in row else f"{index} alone" for index, row in enumerate(rows)
    ]
    _, session = np.unique(known, return_inverse=True)
    return replace(drawn, session=session)


def _with_known_ranks(
    path: Path, ranks: Sequence[int], names: Sequence[str], rows: Sequence[dict[str, Any]]
) -> tuple[int, ...]:
    known: dict[str, int | None] = {}
    for row in rows:
        first, rank = known.setdefault(row["model"], row.get("rank")), row.get("rank")
        if first != rank:
            raise TraceError(f"{path}: {row['model']} has rank {first} and rank {rank}")
    return tuple(known[name] or rank for name, rank in zip(names, ranks, strict=True))


def _read(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                rows.append(_checked(json.loads(line.decode()), where))
                if len(rows) > 1 and rows[-1]["arrival_s"] < rows[-2]["arrival_s"]:
                    raise TraceError(f"{where} arrives before the one above it")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where} is no JSON: {error}") from None
    if not rows:
        raise TraceError(f"{path} holds no request")
    return rows


def _checked(row: object, where: str) -> dict[str, Any]:
    """Raise ``TraceError`` unless it is a request."""
    if not isinstance(row, dict):
        raise TraceError(f"{where} is no object with {', '.join(_NEEDED)}")
    for name in row:
        if name not in _FIELDS:
            raise TraceError(f"{where}: unknown field {name!r}{near_names(name, _FIELDS)}")
    for name in _NEEDED:
        if row.get(name) is None:
            raise TraceError(f"{where} has no {name}")
    for name, value in row.items():
        wanted = _wanted(name, value)
        if wanted:
            raise TraceError(f"{where}: {name} is {value!r}, must be {wanted}")
    return row


def _wanted(name: str, value: Any) -> str:
    """What the field must be; empty if its value is valid."""
    if name == "arrival_s":
        return "" if type(value) in {int, float} and 0 <= value < math.inf else "seconds from 0 on"
    if name == "model":
        return "" if isinstance(value, str) and value else "the name of an adapter"
    if name == "session":
        return "" if type(value) in {str, int} else "text or a number"
    is_count = type(value) is int and 1 <= value < _TOO_MANY
    return "" if is_count else "a whole number from 1 on"
