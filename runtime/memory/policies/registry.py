"""Memory policies by name."""

from collections.abc import Callable, Mapping

from ...errors import ConfigError
from .corun import CorunMemoryPolicy
from .facts import MemoryFacts, MemoryRules, RankingPolicy
from .lru import LruPolicy


# Loaded when asked for: they need numpy, which reading options does not.
def _chameleon(facts: MemoryFacts) -> RankingPolicy:
    from .chameleon import PRINTED_WEIGHTS, ChameleonMemoryPolicy

    return ChameleonMemoryPolicy(facts.weights or PRINTED_WEIGHTS)


def _libra(facts: MemoryFacts) -> RankingPolicy:
    from .libra import LibraPolicy

    return LibraPolicy(facts)


# LRU under other rules. vLLM divides its memory into two parts, of which neither knows what the
# other has; and KV that is kept must do without its adapter where that is not.
_BASELINES: Mapping[str, MemoryRules] = {
    "static-split": MemoryRules(is_split=True, ties_kv_to_adapter=False),
    "discard-idle": MemoryRules(keeps_idle_adapters=False, ties_kv_to_adapter=False),
    "slora": MemoryRules(
        keeps_idle_adapters=False, ties_kv_to_adapter=False, keeps_history=False
    ),
}  # fmt: skip


def _lru(rules: MemoryRules) -> Callable[[MemoryFacts], RankingPolicy]:
    return lambda _facts: LruPolicy(rules)


MEMORY_POLICIES: Mapping[str, Callable[[MemoryFacts], RankingPolicy]] = {
    "corun": CorunMemoryPolicy,
    "lru": _lru(MemoryRules()),
    "chameleon": _chameleon,
    "libra": _libra,
    **{name: _lru(rules) for name, rules in _BASELINES.items()},
}


def splits_memory(name: str) -> bool:
    """Whether the policy of this name divides the memory between blocks and adapters."""
    return name in _BASELINES and _BASELINES[name].is_split


def make_memory_policy(name: str, facts: MemoryFacts) -> RankingPolicy:
    """Return a new policy. Raises ``ConfigError`` if there is none of this name."""
    try:
        make = MEMORY_POLICIES[name]
    except KeyError:
        known = ", ".join(MEMORY_POLICIES)
        raise ConfigError(f"--memory-policy is {name!r}, must be one of: {known}") from None
    return make(facts)
