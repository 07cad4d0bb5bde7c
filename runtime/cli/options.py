"""``corun options``: generates tables of options, routes and fields in Markdown pages."""

import argparse
import re
from pathlib import Path

from ..config.cluster import ClusterConfig
from ..config.engine import EngineConfig
from ..config.option import OptionSpec, option_specs
from ..config.serve import ServeConfig
from ..errors import ConfigError
from ..exit_codes import EXIT_CODES

_MARKED = re.compile(
    r"(<!-- (\w+): written by `corun options --update [^`\n]+` -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL
)


def run(arguments: argparse.Namespace) -> int:
    """Print the option table, or update the tables in ``--update FILE``."""
    if arguments.update is None:
        print(options_markdown(), end="")
        return 0
    path = Path(arguments.update)
    try:
        document = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--update {path}: {error.strerror}") from None
    path.write_text(update_tables(document), encoding="utf-8")
    return 0


def options_markdown() -> str:
    """Return a table with one line per option of ``corun serve``, ending in a newline."""
    return _table(EngineConfig, ServeConfig)


def cluster_options_markdown() -> str:
    """Return a table of the options that ``corun cluster`` and ``corun gateway`` add."""
    return _table(ClusterConfig)


def exit_codes_markdown() -> str:
    """Return a table of the exit codes of all commands."""
    rows = [f"| {code} | {cause} | {answer} |" for code, (cause, answer) in EXIT_CODES.items()]
    return "\n".join(["| code | cause | what a supervisor should do |", "|---|---|---|", *rows]) + "\n"


def _table(*config_classes: type) -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for config_class in config_classes:
        lines.extend(_row(spec) for spec in option_specs(config_class))
    return "\n".join(lines) + "\n"


def update_tables(document: str) -> str:
    """Return ``document`` with each table between two marks replaced by the current one.

    Raises ``ConfigError`` if it has no such marks, or names an unknown table.
    """
    from ..server.reference import TABLES  # which loads what serves

    tables = {
        "options": options_markdown,
        "cluster": cluster_options_markdown,
        **TABLES,
        "exit_codes": exit_codes_markdown,
    }

    def replaced(found: re.Match[str]) -> str:
        name = found[2]
        if name not in tables:
            raise ConfigError(f"there is no table {name!r}; known: {', '.join(tables)}")
        return f"{found[1]}{tables[name]()}{found[4]}"

    updated, number = _MARKED.subn(replaced, document)
    if number == 0:
        raise ConfigError(
            "no table to update: a line <!-- options: written by `corun options --update FILE` "
            "--> and one <!-- end of options --> are missing"
        )
    return updated


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
