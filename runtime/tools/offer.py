"""The functions that a request offers to the model. Plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .call_format import ANY_ARGUMENTS


class CallMode(Enum):
    """Whether an answer has calls."""

    ALLOWED = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The functions that a request offers, checked."""

    definitions: Sequence[Mapping[str, Any]]  # for the chat template
    mode: CallMode
    callable_names: Sequence[str]  # functions that the answer may call
    parameters: Mapping[str, Mapping[str, Any]]  # schemas of arguments, by name
    strict_names: frozenset[str]
    is_parallel: bool  # several calls in one answer

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas that calls follow: those of strict functions, and of calls that must come."""
        is_forced = self.mode is CallMode.REQUIRED
        return {
            name: self.parameters[name] if is_forced or name in self.strict_names else ANY_ARGUMENTS
            for name in self.callable_names
        }

    @property
    def is_constrained(self) -> bool:
        """Whether calls follow a grammar."""
        is_strict = not self.strict_names.isdisjoint(self.callable_names)
        return self.mode is CallMode.REQUIRED or is_strict
