"""Workloads of many adapters: arrivals, lengths and adapters of requests, drawn or from a log."""

import json
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..near_names import near_names
from .draw_inputs import HASHED_TOKENS, DrawInputs, Drawn, TraceError
from .draws import draw_columns, scaled
from .popularity import with_drawn_ranks
from .registry import recipes
from .workload_spec import SessionSpec, WorkloadSpec

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
    names, indices = np.unique([row["model"] for row in rows], return_inverse=True)
    adapters, ranks = with_drawn_ranks(indices, inputs, spec.adapters.ranks)
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


_LIMIT_OVER_P99 = 4


CONTENT_TOKENS = 16  # of a prompt that one id stands for


def with_follow_ups(drawn: Drawn, spec: SessionSpec, rng: np.random.Generator) -> Drawn:
    """Make some requests follow-ups of earlier ones, with their sessions and adapters.

    Lengths and arrivals stay. The earlier request is drawn among the last requests of sessions,
    if it is neither too new nor too old; without one, the request begins a session.
    """
    if not spec.follow_up_share:
        return drawn
    arrival_s = drawn.arrival_s.tolist()
    adapters, session = drawn.adapters.copy(), np.arange(len(arrival_s))
    wants = rng.random(len(arrival_s)) < spec.follow_up_share
    shares = rng.random(len(arrival_s))
    too_new: deque[int] = deque()
    open_ends: list[int] = []  # by arrival
    for index, now_s in enumerate(arrival_s):
        while too_new and arrival_s[too_new[0]] <= now_s - spec.min_gap_s:
            open_ends.append(too_new.popleft())
        num_old = bisect_left(open_ends, now_s - spec.max_gap_s, key=arrival_s.__getitem__)
        del open_ends[:num_old]
        if wants[index] and open_ends:
            before = open_ends.pop(int(shares[index] * len(open_ends)))
            adapters[index], session[index] = adapters[before], session[before]
        too_new.append(index)
    return replace(drawn, adapters=adapters, session=session)


def shared_contents(sessions: Iterable[int], prompt_tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Ids of each prompt's contents: prompts of one session share their beginning.

    The shorter of two is a prefix of the longer. See ``WorkloadRequest.content_ids``.
    """
    ids = count()
    known: dict[int, tuple[int, ...]] = {}
    contents = []
    for session, num_tokens in zip(sessions, prompt_tokens, strict=True):
        wanted = num_tokens // CONTENT_TOKENS
        longest = known.get(session, ())
        if len(longest) < wanted:
            longest = known[session] = (*longest, *islice(ids, wanted - len(longest)))
        contents.append(longest[:wanted])
    return contents


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request; the adapter is an index into ``Workload.ranks``."""

    arrival_s: float
    adapter: int
    prompt_tokens: int
    output_tokens: int  # the true length, hidden from policies
    # Of its prompt, from the start: each identifies ``Workload.content_tokens`` tokens. Other
    # tokens are unique, as are generated ones, even for the next turn that quotes them.
    content_ids: tuple[int, ...] = ()
    session: int | None = None  # requests of a session share contents; None = it has none


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival, and their adapters."""

    requests: tuple[WorkloadRequest, ...]
    ranks: tuple[int, ...]  # by adapter
    max_tokens: int  # of each request: a limit far above most true lengths
    has_trace: bool = True  # False: lengths are drawn from a table of quantiles
    content_tokens: int = HASHED_TOKENS
    names: tuple[str, ...] = ()  # by adapter; empty = they have no names


def make_workload(
    name: str, *, rate_rps: float, num_requests: int, seed: int, traces: Path | None
) -> Workload:
    """Draw ``num_requests`` requests of a recipe that arrive at ``rate_rps`` on average.

    Raises ``ConfigError`` if there is no such recipe, and what ``draw_workload`` raises.
    """
    if name not in recipes():
        raise ConfigError(f"the workload is {name!r}, must be one of: {', '.join(recipes())}")
    spec = replace(recipes()[name].spec, rps=rate_rps, requests=num_requests, duration_s=None, seed=seed)
    return draw_workload(spec, traces)


def draw_workload(spec: WorkloadSpec, traces: Path | None) -> Workload:
    """Draw the requests of ``spec``; ``traces``: the directory of trace files, if there is one.

    Raises ``TraceError`` if it needs a trace that is missing or invalid.
    """
    rng = np.random.default_rng(spec.seed)
    inputs = DrawInputs(spec.rate_rps, spec.num_requests, traces, rng)
    if spec.json_lines is not None:
        drawn = draw_json_lines(spec, inputs)
    else:
        drawn = with_follow_ups(draw_columns(spec, inputs), spec.sessions, rng)
    prompt = np.maximum(1, drawn.prompt_tokens // spec.lengths.prompt_divisor)
    output = np.maximum(1, drawn.output_tokens // spec.lengths.output_divisor)
    sessions = [None] * len(prompt) if drawn.session is None else drawn.session.tolist()
    contents, content_tokens = _contents(spec, drawn, prompt.tolist())
    columns = (drawn.arrival_s, drawn.adapters, prompt, output)
    rows = zip(*(column.tolist() for column in columns), contents, sessions, strict=True)
    return Workload(
        tuple(WorkloadRequest(*row) for row in rows),
        drawn.ranks,
        _LIMIT_OVER_P99 * max(1, int(drawn.p99_output_tokens) // spec.lengths.output_divisor),
        has_trace=drawn.has_trace,
        content_tokens=content_tokens,
        names=drawn.names,
    )


def _contents(
    spec: WorkloadSpec, drawn: Drawn, prompt_tokens: Sequence[int]
) -> tuple[Sequence[tuple[int, ...]], int]:
    """Ids of the prompts' contents, and the number of tokens that each identifies."""
    hashed_tokens = HASHED_TOKENS // spec.lengths.prompt_divisor
    if drawn.hash_ids:
        return drawn.hash_ids, hashed_tokens
    if drawn.session is None:
        return [()] * len(prompt_tokens), hashed_tokens
    return shared_contents(drawn.session.tolist(), prompt_tokens), CONTENT_TOKENS
