"""The results of trying classes of transformers: plain data."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

ADAPTER_KINDS = ("attention", "feed-forward", "all-linear")


class Parity(StrEnum):
    """The result for the base, or for one kind of adapter."""

    EXACT = "exact"
    REFUSED = "refused"
    NOT_BUILT = "not built"  # transformers or PEFT cannot make it
    WRONG = "WRONG"  # served, and differs from transformers + PEFT
    FAILED = "FAILED"  # an error that is no refusal
    NONE = "–"  # there is none, or the base is not served


class Trial(msgspec.Struct, frozen=True):
    """The result for one class."""

    model_type: str
    model_class: str
    outcomes: tuple[Parity, ...] = (Parity.NONE,) * (1 + len(ADAPTER_KINDS))  # the base first
    reason: str = ""  # for all that is not exact

    @property
    def has_failed(self) -> bool:
        """Whether something is served that is not exact, or ended with another error."""
        return not {Parity.WRONG, Parity.FAILED}.isdisjoint(self.outcomes)

    def ended(self, outcome: Parity, reason: str) -> "Trial":
        """Return the trial with a base that is not served."""
        outcomes = (outcome, *self.outcomes[1:])
        return Trial(self.model_type, self.model_class, outcomes, reason)

    def with_results(self, outcomes: Sequence[Parity], reasons: Mapping[str, str]) -> "Trial":
        """Return the trial with results; ``reasons`` by kind of adapter."""
        told: dict[str, list[str]] = {}
        for kind, reason in reasons.items():
            told.setdefault(reason, []).append(kind)
        text = "; ".join(f"{', '.join(kinds)}: {reason}" for reason, kinds in told.items())
        return Trial(self.model_type, self.model_class, tuple(outcomes), text)
