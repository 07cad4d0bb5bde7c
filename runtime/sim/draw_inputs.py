"""Inputs and results of drawing a workload. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Adapters = tuple[Ints, tuple[int, ...]]  # the adapter of each request; ranks by adapter


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """How many requests to draw, and from which traces."""

    rate_rps: float
    num_requests: int
    traces: Path | None  # directory of trace files
    rng: np.random.Generator


@dataclass(frozen=True, slots=True)
class Drawn:
    """Columns of a workload, before lengths are divided."""

    arrival_s: NDArray[np.float64]
    prompt_tokens: Ints
    output_tokens: Ints
    adapters: Ints
    ranks: tuple[int, ...]  # by adapter
    p99_output_tokens: float  # of the whole trace
    has_trace: bool = True
    hash_ids: Sequence[tuple[int, ...]] = ()  # see ``RequestTrace``; empty = prompts share none
    session: Ints | None = None  # of each request; None = there are no sessions
    names: tuple[str, ...] = ()  # by adapter; () = adapters have no names
