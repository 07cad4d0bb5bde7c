"""How a request can be started when its adapter is not on the device. Plain data."""

from dataclasses import dataclass
from enum import StrEnum


class LoadStrategy(StrEnum):
    """What happens between the arrival of a cold request and its first token."""

    BLOCKING = "blocking"  # all requests wait for the adapter; a baseline, by name only
    ASYNC_LOAD = "async_load"  # the others go on, the request waits for its adapter
    PIPELINED = "pipelined"  # starts at once, each layer waits for its own layer group
    ASSISTED = "assisted"  # starts at once, the first layers' deltas come from CPU workers


AT_ONCE = (LoadStrategy.PIPELINED, LoadStrategy.ASSISTED)  # the load need not have ended


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected times of one strategy, in seconds from now."""

    strategy: LoadStrategy
    first_token_s: float
    second_token_s: float
    stall_s: float  # by which each running request is held up beyond a warm prefill
    split_layer: int  # of the first chunk; layers below it are computed by workers


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice, and why."""

    strategy: LoadStrategy
    reason: str
    predictions: tuple[Prediction, ...] = ()  # of all strategies compared, the chosen one first
