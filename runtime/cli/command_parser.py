"""A command's parser and its help: the most used options in groups, and examples.

``--help-all`` shows every option. Imports nothing heavy.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..config.flags import add_flag
from ..config.groups import OptionGroup, is_common
from ..config.option import OptionSpec
from ..errors import ConfigError

_HELP_COLUMN = 32
_MIN_WIDTH, _MAX_WIDTH = 60, 100  # of lines, in characters
_SHORT = 20  # a command with at most so many options shows them all


@dataclass(frozen=True, slots=True)
class _Entry:
    """An argument as help shows it."""

    usage: str
    text: str
    flags: tuple[str, ...] = ()  # none = positional
    default: str = ""
    choices: tuple[str, ...] = ()
    is_common: bool = True
    in_usage: str = ""  # of a positional one


class CommandParser(argparse.ArgumentParser):
    """Reads the arguments of one command. An error is one line, without the usage."""

    def __init__(self, *, examples: Sequence[tuple[str, str]] = (), **arguments: Any) -> None:
        """``examples``: pairs of a command line and what it does."""
        super().__init__(add_help=False, allow_abbrev=False, **arguments)
        self._examples = examples
        self._sections: dict[str, list[_Entry]] = {}
        self.add_argument("-h", "--help", "--help-all", action=_HelpAction)

    def add(
        self,
        title: str,
        *names: str,
        help: str,
        container: "argparse._ActionsContainer | None" = None,
        **arguments: Any,
    ) -> None:
        """Add an argument that no configuration has, under the heading ``title``.

        ``container``: the parser, or one of its groups of which only one may be given.
        """
        action = (container or self).add_argument(*names, **arguments)
        metavar, flags = str(action.metavar or ""), tuple(action.option_strings)
        dots = {"?": "[{}]", "+": "{} ..."}.get(str(action.nargs), "{}")
        usage = " ".join(filter(None, (*flags, metavar)))
        entry = _Entry(usage, help, flags, in_usage="" if flags else dots.format(metavar))
        self._sections.setdefault(title, []).append(entry)

    def add_options(self, command: str, groups: Sequence[OptionGroup], specs: Sequence[OptionSpec]) -> None:
        """Add options of configurations under the headings of their groups."""
        by_name = {spec.name: spec for spec in specs}
        for group in groups:
            for name in (*group.common, *group.rest):
                if name in by_name:
                    spec = by_name.pop(name)
                    self._add_option(group.title, spec, is_common(command, group, name))
        assert not by_name, f"options in no group: {', '.join(by_name)}"

    def _add_option(self, title: str, spec: OptionSpec, is_shown: bool) -> None:
        entry = _Entry(
            usage=_usage_of(spec),
            text=spec.help,
            flags=add_flag(self, spec),
            default="" if spec.kind is bool or spec.default in (None, ()) else str(spec.default),
            choices=spec.choices,
            is_common=is_shown,
            in_usage=f"[{spec.flag}]" if spec.positional else "",
        )
        self._sections.setdefault(title, []).append(entry)

    def flags(self) -> list[str]:
        return [flag for entry in self._entries() for flag in entry.flags]

    def choices(self) -> dict[str, tuple[str, ...]]:
        """Return the values of each flag that takes one of several words."""
        return {entry.flags[0]: entry.choices for entry in self._entries() if entry.choices}

    def error(self, message: str) -> NoReturn:
        """Raise ``ConfigError``."""
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def help_text(self, *, shows_all: bool) -> str:
        """Return the text of ``--help`` or, if it ``shows_all``, of ``--help-all``."""
        shows_all = shows_all or len(list(self._entries())) <= _SHORT
        return "\n".join(self._help_lines(shows_all)) + "\n"

    def _help_lines(self, shows_all: bool) -> Iterator[str]:
        width = min(max(shutil.get_terminal_size().columns - 1, _MIN_WIDTH), _MAX_WIDTH)
        positional = [entry.in_usage for entry in self._entries() if entry.in_usage]
        yield " ".join(("usage:", self.prog, *positional, "[OPTION ...]"))
        yield ""
        yield from textwrap.wrap(self.description or "", width)
        if self._examples:
            yield ""
            yield "Examples:"
        for command, what in self._examples:
            yield from columns(command, what, width)
        for title, entries in self._sections.items():
            shown = [entry for entry in entries if shows_all or entry.is_common]
            if shown:
                yield ""
                yield f"{title}:"
            for entry in shown:
                text = _full_text(entry) if shows_all else _short_text(entry)
                yield from columns(entry.usage, text, width)
        if not shows_all:
            yield ""
            yield f"{self.prog} --help-all shows all options."

    def _entries(self) -> Iterator[_Entry]:
        for entries in self._sections.values():
            yield from entries


class _HelpAction(argparse.Action):
    """``--help`` and ``--help-all``: print the text and end."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        assert isinstance(parser, CommandParser)
        print(parser.help_text(shows_all=option_string == "--help-all"), end="")
        parser.exit()


def _usage_of(spec: OptionSpec) -> str:
    if spec.positional:
        return spec.flag
    if spec.kind is bool:
        return f"--[no-]{spec.key}"
    dots = " ..." if spec.repeated and not spec.one_each else ""
    return f"{spec.flag} {spec.metavar or ('NAME' if spec.choices else spec.value_name)}{dots}"


def _full_text(entry: _Entry) -> str:
    if not entry.choices:
        return f"{entry.text} Default: {entry.default}." if entry.default else entry.text
    default = f"; default: {entry.default}" if entry.default else ""
    return f"{entry.text} One of {', '.join(entry.choices)}{default}."


def _short_text(entry: _Entry) -> str:
    """Return what comes before the first semicolon or full stop, and the default."""
    text = re.split(r"[.;](?:\s|$)", entry.text, maxsplit=1)[0]
    return f"{text} (default: {entry.default})" if entry.default else text


def columns(left: str, right: str, width: int) -> Iterator[str]:
    """Yield an indented line with two columns, and more for a long text or a long left one."""
    indent = " " * _HELP_COLUMN
    lines = textwrap.wrap(right, width - _HELP_COLUMN, break_on_hyphens=False)
    first = f"  {left}"
    if lines and len(first) < _HELP_COLUMN - 1:
        first = f"{first:<{_HELP_COLUMN}}{lines.pop(0)}"
    yield first
    for line in lines:
        yield indent + line
