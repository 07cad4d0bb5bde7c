"""Workloads of many adapters, drawn from traces: which request arrives when, with what.

The recipe of S1 is Chameleon's (section 5.1): lengths of Azure's conversations, Poisson arrivals,
a hundred adapters of five ranks in equal numbers, small ranks more popular by a power law. The
others change one thing each. Same seed, same workload.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .traces import RequestTrace, TraceError, read_azure, read_gentd26_ids

RANKS = (8, 16, 32, 64, 128)
_NUM_ADAPTERS = 100

# Quantiles 0, 0.05, … 1 of the lengths of Azure's conversations, for machines without the trace.
# Source: Azure LLM inference trace 2023 (conversation), first half by time, CC-BY-4.0. Drawn one
# by one, so that the weak correlation of the two (-0.17) is lost.
_CONV_PROMPT_TOKENS = (
    2, 181, 298, 379, 390, 398, 407, 431, 968, 1011, 1035,
    1056, 1081, 1105, 1140, 1200, 1317, 2177, 4075, 4086, 14050,
)  # fmt: skip
_CONV_OUTPUT_TOKENS = (
    7, 38, 50, 60, 71, 81, 88, 94, 102, 114, 140,
    167, 211, 377, 393, 397, 404, 414, 428, 463, 1000,
)  # fmt: skip


_CONV_P99_OUTPUT_TOKENS = 600  # of the trace
_LIMIT_OVER_P99 = 4


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request; the adapter is an index into ``Workload.ranks``."""

    arrival_s: float
    adapter: int
    prompt_tokens: int
    output_tokens: int  # what it will generate, which no policy is told


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival, and the adapters that they name."""

    requests: tuple[WorkloadRequest, ...]
    ranks: tuple[int, ...]  # by adapter
    max_tokens: int  # that a request may generate: a limit far beyond what most do


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a workload is made."""

    profile: str  # the machine and model that it is meant for
    trace: str = "conv"  # of Azure 2023, whose lengths it has
    length_divisor: int = 1
    has_own_clock: bool = False  # the trace's arrivals, scaled to the rate; else Poisson
    has_gentd26_ids: bool = False  # adapters in GenTD26's order; else drawn independently


RECIPES: Mapping[str, Recipe] = {
    "S1": Recipe("a40-llama7b"),
    "S2": Recipe("a40-llama7b", length_divisor=5),
    "S3": Recipe("a40-llama8b", has_own_clock=True, has_gentd26_ids=True),
    "S4": Recipe("a40-llama7b", trace="code", has_own_clock=True),
    "S5": Recipe("a40-llama7b", has_own_clock=True, has_gentd26_ids=True),
}


def make_workload(
    name: str, *, rate_rps: float, num_requests: int, seed: int, traces: Path | None
) -> Workload:
    """Draw ``num_requests`` requests that arrive at ``rate_rps`` on average.

    Args:
        name: One of ``RECIPES``.
        rate_rps: Requests per second.
        num_requests: How many.
        seed: Of everything that is drawn.
        traces: Where trace files lie; None = nowhere.

    Raises:
        TraceError: The recipe needs a trace that is not there, or that cannot be used.
    """
    recipe = RECIPES[name]
    rng = np.random.default_rng(seed)
    try:
        whole = read_azure(traces, recipe.trace)
    except TraceError:
        if traces is not None or recipe.has_own_clock:
            raise
        trace = _drawn_from_quantiles(num_requests, rng)
        p99_tokens = _CONV_P99_OUTPUT_TOKENS
    else:
        trace = _window(whole, num_requests, rng)
        p99_tokens = int(np.quantile(whole.output_tokens, 0.99))
    max_tokens = _LIMIT_OVER_P99 * max(1, p99_tokens // recipe.length_divisor)
    if recipe.has_own_clock:
        arrival_s = trace.arrival_s * (_rate_rps(trace.arrival_s) / rate_rps)
    else:
        arrival_s = np.cumsum(rng.exponential(1.0 / rate_rps, num_requests))
        trace = _shuffled(trace, rng)
    if recipe.has_gentd26_ids:
        adapters, ranks = _gentd26_adapters(traces, num_requests, rng)
    else:
        adapters, ranks = _ranked_adapters(num_requests, rng)
    prompt, output = (
        np.maximum(1, tokens // recipe.length_divisor)
        for tokens in (trace.prompt_tokens, trace.output_tokens)
    )
    columns = (arrival_s, adapters, prompt, output)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return Workload(tuple(WorkloadRequest(*row) for row in rows), ranks, max_tokens)


def _window(trace: RequestTrace, num_requests: int, rng: np.random.Generator) -> RequestTrace:
    """Requests that follow each other in the trace, from a drawn one on; around its end if need be.

    The gap between the last request and the first one is the trace's mean.
    """
    start = int(rng.integers(len(trace)))
    index = start + np.arange(num_requests)
    period_s = trace.arrival_s[-1] + trace.arrival_s[-1] / max(1, len(trace) - 1)
    arrival_s = trace.arrival_s[index % len(trace)] + (index // len(trace)) * period_s
    picked = index % len(trace)
    return RequestTrace(
        arrival_s - arrival_s[0], trace.prompt_tokens[picked], trace.output_tokens[picked]
    )


def _rate_rps(arrival_s: NDArray[np.float64]) -> float:
    if arrival_s[-1] <= 0.0:
        raise TraceError("all requests of the trace's part arrive at once: no rate to scale by")
    return (len(arrival_s) - 1) / float(arrival_s[-1])


def _shuffled(trace: RequestTrace, rng: np.random.Generator) -> RequestTrace:
    order = rng.permutation(len(trace))
    return RequestTrace(trace.arrival_s, trace.prompt_tokens[order], trace.output_tokens[order])


def _drawn_from_quantiles(num_requests: int, rng: np.random.Generator) -> RequestTrace:
    def draw(quantiles: tuple[int, ...]) -> NDArray[np.int64]:
        at = np.linspace(0.0, 1.0, len(quantiles))
        return np.interp(rng.random(num_requests), at, quantiles).astype(np.int64)

    prompt, output = draw(_CONV_PROMPT_TOKENS), draw(_CONV_OUTPUT_TOKENS)
    return RequestTrace(np.zeros(num_requests), prompt, output)


def _ranked_adapters(
    num_requests: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Ranks in equal numbers; the k-th smallest with weight 1/k, adapters of one rank alike."""
    per_rank = _NUM_ADAPTERS // len(RANKS)
    weights = 1.0 / np.arange(1, len(RANKS) + 1)
    rank_index = rng.choice(len(RANKS), num_requests, p=weights / weights.sum())
    adapters = rank_index * per_rank + rng.integers(per_rank, size=num_requests)
    return adapters, tuple(rank for rank in RANKS for _ in range(per_rank))


def _gentd26_adapters(
    traces: Path | None, num_requests: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """LoRAs in the order of the trace from a drawn request on; their ranks are drawn."""
    ids = read_gentd26_ids(traces)
    start = int(rng.integers(len(ids)))
    names, adapters = np.unique(
        ids[(start + np.arange(num_requests)) % len(ids)], return_inverse=True
    )
    ranks = [RANKS[index % len(RANKS)] for index in range(len(names))]
    rng.shuffle(ranks)
    return adapters.astype(np.int64), tuple(ranks)
