"""Memory policies by name."""

from collections.abc import Callable, Mapping

from ...policy_text import check_options, parse_policy
from .corun import CorunMemoryPolicy
from .facts import MemoryFacts, RankingPolicy
from .lru import LruPolicy

_CORE: Mapping[str, Callable[[MemoryFacts], RankingPolicy]] = {
    "corun": CorunMemoryPolicy,
    "lru": lambda _: LruPolicy(),
}
_SPLITS = "static-split"
MEMORY_POLICIES = (*_CORE, "chameleon", "libra", _SPLITS, "discard-idle", "slora")


def memory_policy_maker(text: str, flag: str = "--memory-policy") -> Callable[[MemoryFacts], RankingPolicy]:
    """Return what makes the policy of ``text``: NAME or NAME:KEY=NUMBER,KEY=NUMBER.

    Raises ``ConfigError`` that names ``flag`` for an unknown name or a wrong option.
    """
    name, options = parse_policy(text, MEMORY_POLICIES, flag)
    if name == "chameleon":
        from ..papers.chameleon import chameleon_maker

        return chameleon_maker(options, flag)
    check_options(name, options, (), flag)
    if name in _CORE:
        return _CORE[name]
    if name == "libra":
        from ..papers.libra import make_libra

        return make_libra
    from ..papers.baselines import BASELINES

    return lambda _: LruPolicy(BASELINES[name])


def splits_memory(text: str) -> bool:
    """Whether the policy of this name divides memory between blocks and adapters."""
    return text == _SPLITS


def make_memory_policy(text: str, facts: MemoryFacts) -> RankingPolicy:
    """Return a new policy. Raises what ``memory_policy_maker`` raises."""
    return memory_policy_maker(text)(facts)
