"""``corun models``: tries which classes of the installed transformers are served exactly."""

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from ..errors import ConfigError
from ..model_trials.outcome import Trial, page_with, row_of, trials_of, versions_of
from ..model_trials.processes import try_in_processes
from ..near_names import near_names
from .main import in_order

_LIBRARIES = ("corun", "transformers", "peft", "torch")


def run(arguments: argparse.Namespace) -> int:
    """Print or write a line for each class; return 1 if one is served and not exact."""
    if find_spec("peft") is None:
        raise ConfigError("corun models compares with PEFT, which is missing: pip install peft")
    from ..model_trials.tiny_config import model_classes

    model_types = _checked(arguments.model_types, list(model_classes()))
    with in_order():
        if arguments.update is not None:
            trials = _update(Path(arguments.update), model_types, is_all=not arguments.model_types)
        else:
            trials = []
            for trial in try_in_processes(model_types):
                trials.append(trial)
                print(row_of(trial), flush=True)
    return 1 if any(trial.has_failed for trial in trials) else 0


def _checked(asked: list[str], known: list[str]) -> list[str]:
    for name in asked:
        if name not in known:
            near = near_names(name, known, "; near names: {}", show=str)
            raise ConfigError(f"transformers has no text model of type {name!r}{near}")
    return asked or known


def _update(page: Path, model_types: list[str], *, is_all: bool) -> list[Trial]:
    """Try the types and write their lines of the table in ``page``; return these results.

    Unless the types are all, the other lines stay. Results of an interrupted run with the same
    versions are kept. Raises ``ConfigError`` if the page cannot be read, has no place for the
    table, or has lines for other versions that would stay.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    partial = page.with_name(f"{page.name}.partial")
    try:
        document = page.read_text(encoding="utf-8")
        others = {} if is_all else dict(trials_of(document))
        page_with(document, (), versions)
        if others and versions_of(document) != versions:
            raise ConfigError(f"{page} is not for {versions}: update all types")
        done = _resumed(partial, versions, model_types) if is_all else _tried(model_types)
        others |= {trial.model_type: trial for trial in done}
        page.write_text(page_with(document, others.values(), versions), encoding="utf-8")
        if is_all:
            partial.unlink()
    except OSError as error:
        raise ConfigError(f"--update {page}: {error}") from error
    return done


def _resumed(partial: Path, versions: str, model_types: list[str]) -> list[Trial]:
    """Try the types without a result in ``partial``, which gets their results."""
    text = partial.read_text(encoding="utf-8") if partial.exists() else ""
    first, *lines = text.splitlines() or [""]
    done = [msgspec.json.decode(line, type=Trial) for line in lines] if first == versions else []
    known = {trial.model_type for trial in done}
    with partial.open("a", encoding="utf-8") as file:
        if known:
            print(f"continuing: {len(known)} types are done", file=sys.stderr)
        else:
            file.truncate(0)
            file.write(f"{versions}\n")

        def keep(trial: Trial) -> None:
            file.write(f"{msgspec.json.encode(trial).decode()}\n")
            file.flush()

        return done + _tried([name for name in model_types if name not in known], keep)


def _tried(model_types: list[str], keep: Callable[[Trial], None] = lambda trial: None) -> list[Trial]:
    """Try types, report progress, and call ``keep`` with each result."""
    trials = []
    for trial in try_in_processes(model_types):
        keep(trial)
        trials.append(trial)
        progress = f"{len(trials)} of {len(model_types)}: {trial.model_type}"
        print(f"{progress}: {', '.join(trial.outcomes)}", file=sys.stderr)
    return trials
