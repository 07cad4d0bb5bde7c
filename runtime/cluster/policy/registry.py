"""Routers by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....profiles.models import MachineModel
from ....profiles.step_time import forward_s
from ...errors import ConfigError
from ...near_names import near_names
from .by_shares import LoraServeRouter
from .dlora import DloraRouter
from .predicted import PredictedRouter
from .router import Router
from .simple import (
    AffinityRouter,
    FirstFitRouter,
    LeastTokensRouter,
    RandomRouter,
    TwoChoicesRouter,
)
from .toppings import ToppingsPaperRouter, ToppingsRouter

_SLO_FACTOR = 1.5  # Toppings, section 7.4: of the time per token without adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """What routers are made with."""

    num_routers: int = 1  # that send to the same servers, and know nothing of each other
    slo_tpot_s: float  # time per output token that servers shall keep


ROUTERS: Mapping[str, Callable[[RouterFacts], Router]] = {
    "predicted": lambda facts: PredictedRouter(num_routers=facts.num_routers),
    "toppings": lambda facts: ToppingsRouter(slo_tpot_s=facts.slo_tpot_s),
    "toppings-paper": lambda facts: ToppingsPaperRouter(slo_tpot_s=facts.slo_tpot_s),
    "loraserve": lambda _: LoraServeRouter(),
    "loraserve-paper": lambda _: LoraServeRouter(is_as_printed=True),
    "least-tokens": lambda _: LeastTokensRouter(),
    "p2c": lambda _: TwoChoicesRouter(),
    "random": lambda _: RandomRouter(),
    "first-fit": lambda _: FirstFitRouter(),
    "affinity": lambda _: AffinityRouter(),
    "dlora": lambda _: DloraRouter(),
}

# Of those that clusters cannot run, what they lack.
_ONLY_SIMULATED = {
    "dlora": "it moves waiting requests from engine to engine, and engines hand none over"
}


def check_live_router(name: str) -> None:
    """Raise ``ConfigError`` if there is none of this name that a cluster can run."""
    check_router(name)
    if name in _ONLY_SIMULATED:
        raise ConfigError(
            f"--router {name} is for corun simulate alone: {_ONLY_SIMULATED[name]}; "
            "least-tokens, p2c and predicted go by load, too"
        )


def check_router(name: str) -> None:
    """Raise ``ConfigError`` if there is none of this name."""
    if name not in ROUTERS:
        known = ", ".join(ROUTERS)
        hint = near_names(name, ROUTERS)
        raise ConfigError(f"--router is {name!r}, must be one of: {known}{hint}")


def make_router(name: str, facts: RouterFacts) -> Router:
    """Return a new router. Raises ``ConfigError`` if there is none of this name."""
    check_router(name)
    return ROUTERS[name](facts)


def default_slo_tpot_s(model: MachineModel, max_num_seqs: int, total_kv_tokens: int) -> float:
    """1.5 times a step of a full batch without adapters, with as much context as memory holds."""
    rows = max_num_seqs
    context = total_kv_tokens // rows
    return _SLO_FACTOR * forward_s(model, (1,) * rows, (context,) * rows, (0,) * rows)
