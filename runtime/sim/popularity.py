"""Draws the adapters of requests, and the ranks of adapters."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .draw_inputs import Adapters, DrawInputs, Ints
from .registry import draw_names
from .workload_spec import AdapterSpec

_SHIFTING_SHARE = 0.5  # LoRAServe, section V-E: of the largest rank at first


def draw_adapters(inputs: DrawInputs, spec: AdapterSpec, sessions: Ints | None = None) -> Adapters:
    """Draw for each request, or for each session; ``sessions``: the session of each request."""
    if spec.popularity == "by-rank":
        adapters, ranks = _by_rank(inputs, spec)
        return (adapters if sessions is None else adapters[sessions]), ranks
    if spec.popularity == "zipf":
        names = _power_law(inputs, spec.number, spec.exponent, inputs.num_requests)
    elif spec.popularity == "in-turn":
        names = np.arange(inputs.num_requests) % spec.number
    else:
        names = draw_names(inputs, spec.popularity)
    return with_drawn_ranks(names if sessions is None else names[sessions], inputs, spec.ranks)


def with_drawn_ranks(names: Ints, inputs: DrawInputs, choice: Sequence[int]) -> Adapters:
    """Adapters numbered by ``names``; ranks in equal numbers, shuffled."""
    found, adapters = np.unique(names, return_inverse=True)
    ranks = [choice[index % len(choice)] for index in range(len(found))]
    inputs.rng.shuffle(ranks)
    return adapters.astype(np.int64), tuple(ranks)


def _by_rank(inputs: DrawInputs, spec: AdapterSpec) -> Adapters:
    """Ranks in equal numbers, adapters of one rank next to each other."""
    per_rank = spec.number // len(spec.ranks)
    rank_index = _rank_indices(inputs, spec)
    if spec.within_exponent:
        within = _power_law(inputs, per_rank, spec.within_exponent, inputs.num_requests)
    else:
        within = inputs.rng.integers(per_rank, size=inputs.num_requests)
    return rank_index * per_rank + within, tuple(rank for rank in spec.ranks for _ in range(per_rank))


def _rank_indices(inputs: DrawInputs, spec: AdapterSpec) -> Ints:
    number = np.arange(1, len(spec.ranks) + 1)
    if spec.rank_popularity == "shifting":
        return _shifting(inputs, len(spec.ranks))
    weights = 0.5**number if spec.rank_popularity == "halving" else 1.0 / number**spec.rank_exponent
    return inputs.rng.choice(len(spec.ranks), inputs.num_requests, p=weights / weights.sum())


def _shifting(inputs: DrawInputs, num_ranks: int) -> Ints:
    """Shares of ranks change linearly from the first request to the last."""
    others = (1.0 - _SHIFTING_SHARE) / (num_ranks - 1)
    first, last = np.full(num_ranks, others), np.full(num_ranks, others)
    first[-1] = last[0] = _SHIFTING_SHARE
    progress = np.linspace(0.0, 1.0, inputs.num_requests)[:, None]
    upper: NDArray[np.float64] = np.cumsum(first + (last - first) * progress, axis=1)
    found: Ints = (inputs.rng.random(inputs.num_requests)[:, None] >= upper[:, :-1]).sum(axis=1)
    return found


def _power_law(inputs: DrawInputs, num_ids: int, exponent: float, num_drawn: int) -> Ints:
    """Draw ids, the k-th with weight k ** -exponent."""
    weights = np.arange(1, num_ids + 1) ** -exponent
    return inputs.rng.choice(num_ids, num_drawn, p=weights / weights.sum())
