"""``corun options``: the option table of the README, to look at or to write."""

import argparse
import re
from pathlib import Path

from ..config.engine import EngineConfig
from ..config.option import OptionSpec, option_specs
from ..config.serve import ServeConfig
from ..errors import ConfigError

BEGIN = "<!-- options: written by `corun options --update README.md` -->"
END = "<!-- end of options -->"


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or bring the one in ``--update FILE`` up to date."""
    if arguments.update is None:
        print(options_markdown(), end="")
        return 0
    path = Path(arguments.update)
    try:
        document = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--update {path}: {error.strerror}") from None
    path.write_text(update_table(document), encoding="utf-8")
    return 0


def options_markdown() -> str:
    """Return a table with one line per option of ``corun serve``, ending in a newline."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for config_class in (EngineConfig, ServeConfig):
        lines.extend(_row(spec) for spec in option_specs(config_class))
    return "\n".join(lines) + "\n"


def update_table(document: str) -> str:
    """Return ``document`` with the table between the two marks replaced by the current one.

    Raises ``ConfigError`` if it has no such marks.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if pattern.search(document) is None:
        raise ConfigError(f"no place for the table: the lines {BEGIN} and {END} are missing")
    block = f"{BEGIN}\n{options_markdown()}{END}"
    return pattern.sub(lambda _: block, document, count=1)


def _row(spec: OptionSpec) -> str:
    return f"| {_usage(spec)} | {_default(spec)} | {_meaning(spec)} |"


def _usage(spec: OptionSpec) -> str:
    if spec.positional:
        return f"`{spec.flag}`"
    if spec.kind is bool:
        return f"`{spec.flag}`"
    value = spec.metavar or ("" if spec.choices else spec.value_name)
    dots = " …" if spec.repeated else ""
    return f"`{spec.flag} {value}{dots}`" if value else f"`{spec.flag}`"


def _default(spec: OptionSpec) -> str:
    if spec.kind is bool:
        return "on" if spec.default else "off"
    return "" if spec.default in (None, ()) else f"`{spec.default}`"


def _meaning(spec: OptionSpec) -> str:
    if not spec.choices or len(spec.choices) == 1:
        return spec.help
    return f"{spec.help} One of {', '.join(f'`{choice}`' for choice in spec.choices)}."
