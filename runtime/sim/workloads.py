"""Workloads of many adapters: arrivals, lengths and adapters of requests, drawn from a seed."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .draw_inputs import HASHED_TOKENS, DrawInputs, Drawn
from .draws import draw_columns
from .json_lines import draw_json_lines
from .registry import recipes
from .workload_spec import SessionSpec, WorkloadSpec

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
