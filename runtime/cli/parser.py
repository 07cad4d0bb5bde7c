"""The command line: which commands there are and which flags each takes.

Imports nothing heavy, so that ``corun --help`` answers at once.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ... import __version__
from ..adapters.info import LEVELS
from ..config.engine import EngineConfig
from ..config.flags import add_flag, add_flags
from ..config.option import OptionSpec, option_specs, suggestion
from ..config.serve import ServeConfig
from ..config.simulate import SimulateConfig, takes
from ..errors import ConfigError


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line, exit code 2, no usage dump."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments; options that were not given are absent.

    Raises ``ConfigError`` for an unknown command or flag.
    """
    arguments, unknown = _build_parser().parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown_message(unknown[0], arguments.command))
    return arguments


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="corun",
        description="Serve many LoRA adapters over one base language model.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"corun {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name, text in _COMMANDS.items():
        commands[name] = subparsers.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
    _add_serve_flags(commands["serve"])
    _add_profile_flags(commands["profile"])
    _add_check_flags(commands["check"])
    _add_adapters_flags(commands["adapters"])
    for name in ("simulate", "plan"):
        for spec in _options(name):
            add_flag(commands[name], spec)
    commands["options"].add_argument(
        "--update", metavar="FILE", help="Rewrite the table in FILE, between its marks."
    )
    return parser


_COMMANDS = {
    "serve": "Serve a model and its adapters over the OpenAI API; without MODEL, the demo.",
    "profile": "Measure this machine with a model: what predictions and budgets are made of.",
    "simulate": "Simulate what engines would do with a workload, by the code that serves.",
    "plan": "Say which load a server bears within an SLO, what binds, and what would change it.",
    "check": "Check whether an adapter can be served over a model, without loading weights.",
    "adapters": "Show where the adapters of a running server are.",
    "env": "Show versions, devices and limits: what a bug report needs.",
    "options": "Write the options of corun serve as a Markdown table.",
}


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with these options; a flag on the command line goes before it.",
    )
    add_flags(parser, EngineConfig, title="model and engine")
    add_flags(parser, ServeConfig, title="server")


def _add_profile_flags(parser: argparse.ArgumentParser) -> None:
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument(
        "--quick", dest="effort", action="store_const", const="quick", default="quick",
        help="Measure for half a minute at most. The default.",
    )  # fmt: skip
    effort.add_argument(
        "--thorough", dest="effort", action="store_const", const="thorough",
        help="Measure for some minutes.",
    )  # fmt: skip
    parser.add_argument(
        "--budget-s", metavar="X",
        help="Measure for so many seconds instead, or a little longer if that is too short.",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FILE", help="Where the profile goes; default: where serve looks."
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="Where the curves go, a PNG; default: beside the profile."
    )
    group = parser.add_argument_group("model and engine")
    for spec in _engine_options("profile"):
        add_flag(group, spec)


def _add_check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="ADAPTER", help="PEFT directory of the adapter.")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="Directory or hub id of the base model; without it, the packaged demo model.",
    )
    for spec in _engine_options("check"):
        add_flag(parser, spec)


def _add_adapters_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000", help="Where the server is.")
    parser.add_argument("--api-key", metavar="KEY", help="One of its keys; default: CORUN_API_KEY.")
    parser.add_argument("--level", metavar="LEVEL", help=f"Only those: {', '.join(LEVELS)}.")


def _engine_options(command: str) -> list[OptionSpec]:
    return [spec for spec in option_specs(EngineConfig) if takes(spec, command)]


def _options(command: str) -> list[OptionSpec]:
    """Of ``simulate`` and ``plan``: their own before those of the engine."""
    own = [spec for spec in option_specs(SimulateConfig) if command in spec.commands]
    return own + _engine_options(command)


def _unknown_message(word: str, command: str) -> str:
    flag = word.split("=", 1)[0]
    kind = "option" if flag.startswith("-") else "argument"
    near = suggestion(flag, _known_flags(command))
    return f"unknown {kind} {flag}{near} (see corun {command} --help)"


def _known_flags(command: str) -> list[str]:
    if command == "serve":
        specs = option_specs(EngineConfig) + option_specs(ServeConfig)
        return ["--config", *(spec.flag for spec in specs)]
    if command in ("simulate", "plan"):
        return [spec.flag for spec in _options(command)]
    flags = [spec.flag for spec in _engine_options(command)]
    if command == "check":
        return ["--model", *flags]
    if command == "profile":
        return ["--quick", "--thorough", "--budget-s", "--output", "--picture", *flags]
    if command == "adapters":
        return ["--url", "--api-key", "--level"]
    return ["--update"] if command == "options" else []
