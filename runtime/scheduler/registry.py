"""Scheduling policies by name."""

from collections.abc import Callable, Mapping

from ..policy_text import check_options, parse_policy
from .corun import CorunPolicy
from .keyed import FcfsPolicy, SjfPolicy
from .policy import PolicyFacts, SchedulerPolicy

_CORE: Mapping[str, Callable[[PolicyFacts], SchedulerPolicy]] = {
    "fcfs": FcfsPolicy,
    "sjf": SjfPolicy,
    "corun": CorunPolicy,
}
SCHEDULER_POLICIES = (*_CORE, "chameleon", "chameleon-paper", "output-only")


def policy_maker(text: str, flag: str = "--scheduling-policy") -> Callable[[PolicyFacts], SchedulerPolicy]:
    """Return what makes the policy of ``text``: NAME or NAME:KEY=NUMBER,KEY=NUMBER.

    Raises ``ConfigError`` that names ``flag`` for an unknown name or a wrong option.
    """
    name, options = parse_policy(text, SCHEDULER_POLICIES, flag)
    if name in _CORE:
        check_options(name, options, (), flag)
        return _CORE[name]
    from .papers.chameleon.policy import chameleon_maker

    return chameleon_maker(name, options, flag)


def make_policy(text: str, facts: PolicyFacts) -> SchedulerPolicy:
    """Return a new policy. Raises what ``policy_maker`` raises."""
    return policy_maker(text)(facts)
