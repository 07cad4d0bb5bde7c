"""Scheduling policies by name."""

from collections.abc import Callable, Mapping

from ..errors import ConfigError
from .fcfs import FcfsPolicy
from .policy import PolicyFacts, SchedulerPolicy

SCHEDULER_POLICIES: Mapping[str, Callable[[PolicyFacts], SchedulerPolicy]] = {"fcfs": FcfsPolicy}


def make_policy(name: str, facts: PolicyFacts) -> SchedulerPolicy:
    """Return a new policy. Raises ``ConfigError`` if there is none of this name."""
    try:
        return SCHEDULER_POLICIES[name](facts)
    except KeyError:
        known = ", ".join(sorted(SCHEDULER_POLICIES))
        raise ConfigError(f"--scheduling-policy is {name!r}, must be one of: {known}") from None
