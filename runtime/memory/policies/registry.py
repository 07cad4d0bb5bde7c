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


def _lru(**rules: bool) -> Callable[[MemoryFacts], RankingPolicy]:
    return lambda _facts: LruPolicy(MemoryRules(**rules))


MEMORY_POLICIES: Mapping[str, Callable[[MemoryFacts], RankingPolicy]] = {
    "corun": CorunMemoryPolicy,
    "lru": _lru(),
    "chameleon": _chameleon,
    "libra": _libra,
    # As vLLM divides its memory: two parts, of which neither knows what the other has.
    "static-split": _lru(is_split=True, ties_kv_to_adapter=False),
    # KV that is kept must do without its adapter, which is not.
    "discard-idle": _lru(keeps_idle_adapters=False, ties_kv_to_adapter=False),
    "slora": _lru(keeps_idle_adapters=False, ties_kv_to_adapter=False, keeps_history=False),
}


def make_memory_policy(name: str, facts: MemoryFacts) -> RankingPolicy:
    """Return a new policy. Raises ``ConfigError`` if there is none of this name."""
    try:
        make = MEMORY_POLICIES[name]
    except KeyError:
        known = ", ".join(MEMORY_POLICIES)
        raise ConfigError(f"--memory-policy is {name!r}, must be one of: {known}") from None
    return make(facts)
