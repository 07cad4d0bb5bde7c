"""Memory policies by name."""

from collections.abc import Callable
from functools import partial

from ...policy_text import check_options, check_switches, parse_policy
from .corun import CorunMemoryPolicy
from .lru import LruPolicy
from .policy import MemoryFacts, RankingPolicy

_SPLITS = "static-split"
_FORGETS = "slora"
MEMORY_POLICIES = ("corun", "lru", "chameleon", "libra", _SPLITS, "discard-idle", _FORGETS)


def memory_policy_maker(text: str, flag: str = "--memory-policy") -> Callable[[MemoryFacts], RankingPolicy]:
    """Return what makes the policy of ``text``: NAME or NAME:KEY=NUMBER,KEY=NUMBER.

    Raises ``ConfigError`` that names ``flag`` for an unknown name or a wrong option.
    """
    name, options = parse_policy(text, MEMORY_POLICIES, flag)
    if name == "corun":
        check_switches(name, options, ("swapper",), flag)
        return partial(CorunMemoryPolicy, has_swapper=bool(options.get("swapper")))
    if name == "chameleon":
        from ..papers.chameleon import chameleon_maker

        return chameleon_maker(options, flag)
    if name == "libra":
        from ..papers.libra import libra_maker

        return libra_maker(options, flag)
    check_options(name, options, (), flag)
    if name == "lru":
        return lambda _: LruPolicy()
    from ..papers.baselines import BASELINES

    return lambda _: LruPolicy(BASELINES[name])


def splits_memory(text: str) -> bool:
    """Whether the policy of this name divides memory between blocks and adapters."""
    return text == _SPLITS


def forgets_history(text: str) -> bool:
    """Whether the policy of this name keeps no KV of requests that have ended."""
    return text == _FORGETS


def make_memory_policy(text: str, facts: MemoryFacts) -> RankingPolicy:
    """Return a new policy. Raises what ``memory_policy_maker`` raises."""
    return memory_policy_maker(text)(facts)
