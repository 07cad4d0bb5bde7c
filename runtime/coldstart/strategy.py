"""Strategies for requests with an adapter that is not on the device. Plain data."""

from dataclasses import dataclass
from enum import StrEnum


class LoadStrategy(StrEnum):
    """How a cold request is served until its first token."""

    BLOCKING = "blocking"  # all requests wait for the adapter; a baseline, only by --load-strategy
    ASYNC_LOAD = "async_load"  # only the request waits for the adapter
    PIPELINED = "pipelined"  # starts at once; each layer waits for its layer group
    ASSISTED = "assisted"  # starts at once; CPU workers compute deltas of the first layers


AT_ONCE = (LoadStrategy.PIPELINED, LoadStrategy.ASSISTED)  # before the load has ended


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected times of one strategy, in seconds from now."""

    strategy: LoadStrategy
    first_token_s: float
    stall_s: float  # delay of each running request beyond a warm prefill
    split_layer: int  # of the first chunk; layers below it are computed by workers


@dataclass(frozen=True, slots=True)
class Decision:
    """A chosen strategy, and the reason."""

    strategy: LoadStrategy
    reason: str
    predictions: tuple[Prediction, ...] = ()  # of all strategies compared, the chosen one first
