"""Scheduling policies by name."""

from collections.abc import Callable, Mapping
from functools import partial

from ..errors import ConfigError
from .chameleon import ChameleonPolicy
from .corun import CorunPolicy
from .fcfs import FcfsPolicy
from .lanes.cuts import OUTPUT_ONLY_WEIGHTS
from .policy import PolicyFacts, SchedulerPolicy
from .sjf import SjfPolicy

SCHEDULER_POLICIES: Mapping[str, Callable[[PolicyFacts], SchedulerPolicy]] = {
    "fcfs": FcfsPolicy,
    "sjf": SjfPolicy,
    "corun": CorunPolicy,
    "chameleon": ChameleonPolicy,
    "chameleon-paper": partial(ChameleonPolicy, is_as_printed=True),
    "output-only": partial(ChameleonPolicy, weights=OUTPUT_ONLY_WEIGHTS),
}


def make_policy(name: str, facts: PolicyFacts) -> SchedulerPolicy:
    """Return a new policy. Raises ``ConfigError`` if there is none of this name."""
    try:
        make = SCHEDULER_POLICIES[name]
    except KeyError:
        known = ", ".join(SCHEDULER_POLICIES)
        raise ConfigError(f"--scheduling-policy is {name!r}, must be one of: {known}") from None
    return make(facts)
