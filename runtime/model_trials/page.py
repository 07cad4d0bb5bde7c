"""The page of all classes: a table between two marks of a Markdown file."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from ..errors import ConfigError
from .outcome import ADAPTER_KINDS, Parity, Trial

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
