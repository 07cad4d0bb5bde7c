"""Workloads of many adapters: which request arrives when, with what. Same seed, same workload."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from .recipes import RECIPES, Ask
from .traces import HASHED_TOKENS

_LIMIT_OVER_P99 = 4


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request; the adapter is an index into ``Workload.ranks``."""

    arrival_s: float
    adapter: int
    prompt_tokens: int
    output_tokens: int  # what it will generate, which no policy is told
    # Of its prompt, from the start: each names ``Workload.content_tokens`` tokens. What has no name
    # is like nothing else; nor is what it generates, even to the next turn that quotes it.
    content_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival, and the adapters that they name."""

    requests: tuple[WorkloadRequest, ...]
    ranks: tuple[int, ...]  # by adapter
    max_tokens: int  # that a request may generate: a limit far beyond what most do
    has_trace: bool = True  # False: its lengths are of a table of quantiles
    content_tokens: int = HASHED_TOKENS


def make_workload(
    name: str, *, rate_rps: float, num_requests: int, seed: int, traces: Path | None
) -> Workload:
    """Draw ``num_requests`` requests that arrive at ``rate_rps`` on average.

    Args:
        name: One of ``RECIPES``.
        rate_rps: Requests per second, above 0.
        num_requests: How many.
        seed: Of everything that is drawn.
        traces: Where trace files lie; None = nowhere.

    Raises:
        ConfigError: There is no such recipe, or no request is asked for.
        TraceError: The recipe needs a trace that is not there, or that cannot be used.
    """
    assert rate_rps > 0.0, rate_rps
    if name not in RECIPES:
        raise ConfigError(f"the workload is {name!r}, must be one of: {', '.join(RECIPES)}")
    if num_requests < 1:
        raise ConfigError(f"a workload of {num_requests} requests holds no request")
    recipe = RECIPES[name]
    ask = Ask(rate_rps, num_requests, traces, np.random.default_rng(seed))
    drawn = recipe.draw(ask)
    prompt = np.maximum(1, drawn.prompt_tokens // recipe.prompt_divisor)
    output = np.maximum(1, drawn.output_tokens // recipe.output_divisor)
    columns = (drawn.arrival_s, drawn.adapters, prompt, output)
    contents = drawn.hash_ids or ((),) * num_requests
    rows = zip(*(column.tolist() for column in columns), contents, strict=True)
    return Workload(
        tuple(WorkloadRequest(*row) for row in rows),
        drawn.ranks,
        _LIMIT_OVER_P99 * max(1, int(drawn.p99_output_tokens) // recipe.output_divisor),
        has_trace=drawn.has_trace,
        content_tokens=HASHED_TOKENS // recipe.prompt_divisor,
    )
