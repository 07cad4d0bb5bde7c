"""Scheduling policies by name."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import ConfigError
from .corun import CorunPolicy
from .keyed import FcfsPolicy, SjfPolicy
from .policy import PolicyFacts, SchedulerPolicy


def _chameleon(facts: PolicyFacts, **options: Any) -> SchedulerPolicy:
    """Import the paper on use, as for all of ``papers``."""
    from .papers.chameleon.policy import ChameleonPolicy

    return ChameleonPolicy(facts, **options)


def _output_only(facts: PolicyFacts) -> SchedulerPolicy:
    from .papers.chameleon.cuts import OUTPUT_ONLY_WEIGHTS

    return _chameleon(facts, weights=OUTPUT_ONLY_WEIGHTS)


SCHEDULER_POLICIES: Mapping[str, Callable[[PolicyFacts], SchedulerPolicy]] = {
    "fcfs": FcfsPolicy,
    "sjf": SjfPolicy,
    "corun": CorunPolicy,
    "chameleon": _chameleon,
    "chameleon-paper": partial(_chameleon, is_as_printed=True),
    "output-only": _output_only,
}


def make_policy(name: str, facts: PolicyFacts) -> SchedulerPolicy:
    """Return a new policy. Raises ``ConfigError`` for an unknown name."""
    try:
        make = SCHEDULER_POLICIES[name]
    except KeyError:
        known = ", ".join(SCHEDULER_POLICIES)
        raise ConfigError(f"--scheduling-policy is {name!r}, must be one of: {known}") from None
    return make(facts)
