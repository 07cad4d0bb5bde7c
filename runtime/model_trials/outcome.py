"""The results of trying classes of transformers, and the table of them in a Markdown file."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from ..errors import ConfigError

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


_MARKED = re.compile(
    r"(<!-- models: written by `corun models --update [^`\n]+` -->\n)(.*?)(<!-- end of models -->)", re.DOTALL
)
_COLUMNS = ("model type", "class", "base", *ADAPTER_KINDS, "why not")
_ROW = re.compile(rf"\| `([^`]+)` \|{' (.*?) [|]' * (len(_COLUMNS) - 2)} (.*) \|")
_VERSIONS = re.compile(r"With (.*?): .*\.")


def page_with(document: str, trials: Iterable[Trial], versions: str) -> str:
    """Return ``document`` with the table of ``trials``, in the order of their types.

    ``versions``: of the libraries that they were made with. Raises ``ConfigError`` if there is no
    place for the table.
    """
    trials = sorted(trials, key=lambda trial: trial.model_type)
    bases = Counter(trial.outcomes[0] for trial in trials)
    counts = ", ".join(f"{bases[one]} {one}" for one in Parity if bases[one])
    lines = [f"With {versions}: {counts}.", "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    table = "\n".join([*lines, *map(row_of, trials)]) + "\n"
    updated, number = _MARKED.subn(lambda found: f"{found[1]}{table}{found[3]}", document)
    if number != 1:
        raise ConfigError(
            "no place for the table: a line <!-- models: written by `corun models --update FILE` "
            "--> and one <!-- end of models --> are missing"
        )
    return updated


def row_of(trial: Trial) -> str:
    """One line of the table."""
    reason = trial.reason.replace("|", "\\|").replace("<", "&lt;")
    return _line([f"`{trial.model_type}`", trial.model_class, *trial.outcomes, reason])


def trials_of(document: str) -> Mapping[str, Trial]:
    """What the table in ``document`` says, by model type."""
    found = {}
    for line in document.splitlines():
        if (match := _ROW.fullmatch(line)) is not None:
            name, model_class, *outcomes, reason = match.groups()
            reason = reason.replace("\\|", "|").replace("&lt;", "<")
            found[name] = Trial(name, model_class, tuple(map(Parity, outcomes)), reason)
    return found


def versions_of(document: str) -> str | None:
    """Of the libraries that the table in ``document`` was made with; None if there is no table."""
    found = next(filter(None, map(_VERSIONS.fullmatch, document.splitlines())), None)
    return None if found is None else found[1]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
