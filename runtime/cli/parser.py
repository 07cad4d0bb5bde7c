"""The command line: which commands there are and which flags each takes.

Imports nothing heavy, so that ``corun --help`` answers at once.
"""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ... import __version__
from ..adapters.info import LEVELS
from ..config.cluster import NOT_FOR_CLUSTERS, ClusterConfig
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
    arguments, unknown = _build_parser().parse_known_args(_joined(argv))
    if unknown:
        raise ConfigError(_unknown_message(unknown[0], arguments.command))
    return arguments


def _joined(argv: Sequence[str]) -> Sequence[str]:
    """Make one word of a command of two, which ``corun cluster MODEL`` would take for a model."""
    command = " ".join(argv[:2])
    return [command, *argv[2:]] if command in _COMMANDS else argv


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
    for name in _CLUSTER_COMMANDS:
        _add_cluster_flags(commands[name], name)
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
    "check": "Check whether an adapter can be served over a model, without loading weights; or "
    "what --quantization costs a model.",
    "adapters": "Show where the adapters of a running server are.",
    "cluster": "Serve a model over several engines behind one URL.",
    "cluster status": "Show the engines of a running cluster, its adapters and cores.",
    "cluster add": "Add engines to a running cluster.",
    "cluster remove": "Remove engines from a running cluster; last copies of adapters move first.",
    "cluster drain": "Let engines of a running cluster end their requests, and remove them.",
    "gateway": "Be one more way into a cluster that runs elsewhere.",
    "env": "Show versions, devices and limits: what a bug report needs.",
    "options": "Write the options of corun serve as a Markdown table.",
}

_CLUSTER_COMMANDS = [name for name in _COMMANDS if name.startswith(("cluster", "gateway"))]
_WITH_ENGINE_IDS = ("cluster remove", "cluster drain")


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
    server = parser.add_argument_group("a server of another kind, measured from outside")
    server.add_argument(
        "--url", metavar="URL",
        help="Measure this vLLM server instead; give --output, --max-num-batched-tokens and "
        "--max-num-seqs as it was started with, and MODEL where it is not on this machine.",
    )  # fmt: skip
    server.add_argument(
        "--max-num-seqs",
        metavar="N",
        default=argparse.SUPPRESS,
        help="Requests that the server takes at once.",
    )
    server.add_argument(
        "--adapters-dir", metavar="DIR",
        help="Where adapters are made for it to load, and deleted again: a directory that it sees "
        "under the same path; default: a temporary one.",
    )  # fmt: skip
    server.add_argument("--server-key", metavar="KEY", help="Its --api-key, if it has one.")
    group = parser.add_argument_group("model and engine")
    for spec in _engine_options("profile"):
        add_flag(group, spec)


def _add_check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "adapter", metavar="ADAPTER", nargs="?", help="PEFT directory of the adapter."
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="Directory or hub id of the base model; without it, the packaged demo model.",
    )
    parser.add_argument(
        "--text", metavar="FILE",
        help="What --quantization is compared on; default: stories of the demo's kind.",
    )  # fmt: skip
    for spec in _engine_options("check"):
        add_flag(parser, spec)


def _add_adapters_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://localhost:8000", help="Where the server is.")
    parser.add_argument("--api-key", metavar="KEY", help="One of its keys; default: CORUN_API_KEY.")
    parser.add_argument(
        "--level", metavar="LEVEL", help=f"Only adapters at this level: {', '.join(LEVELS)}."
    )


def _add_cluster_flags(parser: argparse.ArgumentParser, command: str) -> None:
    if command in _WITH_ENGINE_IDS:
        parser.add_argument(
            "engine_id",
            metavar="ENGINE",
            nargs="+",
            help="As corun cluster status names it; drain takes an agent, too, with all it has.",
        )
    if command in ("cluster", "gateway"):
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file with these options; a flag on the command line goes before it.",
        )
    for title, specs in _cluster_options(command).items():
        group = parser.add_argument_group(title)
        for spec in specs:
            add_flag(group, spec)


def _cluster_options(command: str) -> dict[str, list[OptionSpec]]:
    """By headline."""
    own = [spec for spec in option_specs(ClusterConfig) if command in spec.commands]
    found = {"cluster": own}
    if command == "cluster":
        engine = [spec for spec in option_specs(EngineConfig) if spec.name not in NOT_FOR_CLUSTERS]
        found["model and engines"] = engine
    if command in ("cluster", "gateway"):
        found["server"] = list(option_specs(ServeConfig))
    return found


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
    if command in _CLUSTER_COMMANDS:
        return [spec.flag for specs in _cluster_options(command).values() for spec in specs]
    flags = [spec.flag for spec in _engine_options(command)]
    if command == "check":
        return ["--model", "--text", *flags]
    if command == "profile":
        return [
            *("--quick", "--thorough", "--budget-s", "--output", "--picture"),
            *("--url", "--max-num-seqs", "--adapters-dir", "--server-key", *flags),
        ]
    if command == "adapters":
        return ["--url", "--api-key", "--level"]
    return ["--update"] if command == "options" else []
