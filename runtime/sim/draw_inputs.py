"""Inputs and results of drawing a workload. Plain data."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

DIRECTORY_VARIABLE = "CORUN_TRACES"
HASHED_TOKENS = 512  # of a prompt that one id of a trace stands for

Ints = NDArray[np.int64]
Adapters = tuple[Ints, tuple[int, ...]]  # the adapter of each request; ranks by adapter


class TraceError(ConfigError):
    """A trace is missing, or its file is invalid."""


def trace_directory(option: str | None = None) -> Path | None:
    """The directory of ``option``, or else of the environment; None if neither is set."""
    named = option or os.environ.get(DIRECTORY_VARIABLE)
    return Path(named) if named else None


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
