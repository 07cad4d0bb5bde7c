"""Memory policies by name."""

from collections.abc import Callable, Mapping
from functools import partial

from ...errors import ConfigError
from .corun import CorunMemoryPolicy
from .facts import MemoryFacts, MemoryRules, RankingPolicy
from .lru import LruPolicy


def _chameleon(facts: MemoryFacts) -> RankingPolicy:
    """Import the paper on use, as for all of ``papers``."""
    from ..papers.chameleon import PRINTED_WEIGHTS, ChameleonMemoryPolicy

    return ChameleonMemoryPolicy(facts.weights or PRINTED_WEIGHTS)


def _libra(facts: MemoryFacts) -> RankingPolicy:
    from ..papers.libra import make_libra

    return make_libra(facts)


def _rules_of(baseline: str) -> MemoryRules:
    from ..papers.baselines import BASELINES

    return BASELINES[baseline]


def _baseline(name: str, _: MemoryFacts) -> RankingPolicy:
    return LruPolicy(_rules_of(name))


_BASELINES = ("static-split", "discard-idle", "slora")

MEMORY_POLICIES: Mapping[str, Callable[[MemoryFacts], RankingPolicy]] = {
    "corun": CorunMemoryPolicy,
    "lru": lambda _: LruPolicy(),
    "chameleon": _chameleon,
    "libra": _libra,
    **{name: partial(_baseline, name) for name in _BASELINES},
}


def splits_memory(name: str) -> bool:
    """Whether the policy of this name divides memory between blocks and adapters."""
    return name in _BASELINES and _rules_of(name).is_split


def make_memory_policy(name: str, facts: MemoryFacts) -> RankingPolicy:
    """Return a new policy. Raises ``ConfigError`` for an unknown name."""
    try:
        make = MEMORY_POLICIES[name]
    except KeyError:
        known = ", ".join(MEMORY_POLICIES)
        raise ConfigError(f"--memory-policy is {name!r}, must be one of: {known}") from None
    return make(facts)
