"""Routers by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ....profiles.models import MachineModel
from ....profiles.step_time import forward_s
from ...errors import ConfigError
from ...near_names import near_names
from .predicted import PredictedRouter
from .router import Router
from .simple import AffinityRouter, FirstFitRouter, LeastTokensRouter, RandomRouter, TwoChoicesRouter
from .toppings import ToppingsRouter

_SLO_FACTOR = 1.5  # of the time per token without adapters: Toppings, section 7.4


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """Inputs for new routers."""

    num_routers: int = 1  # independent routers of the same servers
    slo_tpot_s: float  # target time per output token


# Imported on use, as all of ``papers``.
def _toppings_as_printed(facts: RouterFacts) -> Router:
    from .papers.routers import ToppingsPaperRouter

    return ToppingsPaperRouter(slo_tpot_s=facts.slo_tpot_s)


def _loraserve(_: RouterFacts, *, is_as_printed: bool = False) -> Router:
    from .papers.routers import LoraServeRouter

    return LoraServeRouter(is_as_printed=is_as_printed)


def _dlora(_: RouterFacts) -> Router:
    from .papers.routers import DloraRouter

    return DloraRouter()


ROUTERS: Mapping[str, Callable[[RouterFacts], Router]] = {
    "predicted": lambda facts: PredictedRouter(num_routers=facts.num_routers),
    "toppings": lambda facts: ToppingsRouter(slo_tpot_s=facts.slo_tpot_s),
    "toppings-paper": _toppings_as_printed,
    "loraserve": _loraserve,
    "loraserve-paper": partial(_loraserve, is_as_printed=True),
    "least-tokens": lambda _: LeastTokensRouter(),
    "p2c": lambda _: TwoChoicesRouter(),
    "random": lambda _: RandomRouter(),
    "first-fit": lambda _: FirstFitRouter(),
    "affinity": lambda _: AffinityRouter(),
    "dlora": _dlora,
}

# Routers that clusters cannot run, and the reason.
_ONLY_SIMULATED = {"dlora": "it moves waiting requests between engines, which engines do not support"}


def check_live_router(name: str) -> None:
    """Raise ``ConfigError`` if the router is unknown, or for simulations only."""
    check_router(name)
    if name in _ONLY_SIMULATED:
        raise ConfigError(
            f"--router {name} is for corun simulate alone: {_ONLY_SIMULATED[name]}; "
            "least-tokens, p2c and predicted also route by load"
        )


def check_router(name: str) -> None:
    """Raise ``ConfigError`` if the router is unknown."""
    if name not in ROUTERS:
        known = ", ".join(ROUTERS)
        hint = near_names(name, ROUTERS)
        raise ConfigError(f"--router is {name!r}, must be one of: {known}{hint}")


def make_router(name: str, facts: RouterFacts) -> Router:
    """Return a new router. Raises ``ConfigError`` if it is unknown."""
    check_router(name)
    return ROUTERS[name](facts)


def default_slo_tpot_s(model: MachineModel, max_num_seqs: int, total_kv_tokens: int) -> float:
    """Return 1.5 x the time of a full batch's step, without adapters and with full KV memory."""
    rows = max_num_seqs
    context = total_kv_tokens // rows
    return _SLO_FACTOR * forward_s(model, (1,) * rows, (context,) * rows, (0,) * rows)
