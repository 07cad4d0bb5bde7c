"""Memory policies by name."""

from collections.abc import Callable, Mapping

from ...errors import ConfigError
from .corun import CorunMemoryPolicy
from .facts import MemoryFacts, MemoryRules, RankingPolicy
from .lru import LruPolicy


# Imported on use: they need numpy, which reading options does not.
def _chameleon(facts: MemoryFacts) -> RankingPolicy:
    from .chameleon import PRINTED_WEIGHTS, ChameleonMemoryPolicy

    return ChameleonMemoryPolicy(facts.weights or PRINTED_WEIGHTS)


def _libra(facts: MemoryFacts) -> RankingPolicy:
    from .libra import LibraPolicy

    return LibraPolicy(facts)


# LRU with other rules. vLLM divides memory into two independent parts, so KV may stay without its
# adapter. The others do not keep idle adapters, so kept KV is always without its adapter.
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
    """Whether the policy of this name divides memory between blocks and adapters."""
    return name in _BASELINES and _BASELINES[name].is_split


def make_memory_policy(name: str, facts: MemoryFacts) -> RankingPolicy:
    """Return a new policy. Raises ``ConfigError`` for an unknown name."""
    try:
        make = MEMORY_POLICIES[name]
    except KeyError:
        known = ", ".join(MEMORY_POLICIES)
        raise ConfigError(f"--memory-policy is {name!r}, must be one of: {known}") from None
    return make(facts)
