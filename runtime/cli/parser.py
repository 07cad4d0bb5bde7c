"""The command line: which commands there are and which arguments each takes.

Imports nothing heavy, so that ``corun --help`` answers at once.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import __version__
from ..adapters.info import LEVELS
from ..config.cluster import NOT_FOR_CLUSTERS, ClusterConfig
from ..config.engine import EngineConfig
from ..config.groups import groups_of
from ..config.option import OptionSpec, option_specs, suggestion
from ..config.serve import ServeConfig
from ..config.simulate import SimulateConfig, takes
from ..errors import ConfigError
from ..near_names import near_names
from .command_parser import CommandParser, columns
from .command_texts import COMMAND_GROUPS, COMMANDS, EXAMPLES, SHELLS

_CLUSTER_ACTIONS = tuple(name.split()[1] for name in COMMANDS if name.startswith("cluster "))
_NEAR_ACTION = 0.7  # from this likeness to an action of corun cluster on, a word is a typo
_WITH_ENGINE_IDS = ("cluster remove", "cluster drain")
_WITH_FILE = ("serve", "cluster", "gateway")
_HELP_FLAGS = ("-h", "--help", "--help-all")
_WIDTH = 79


_MODEL = "is not needed: the model is the first argument, a directory or a hub id, no GGUF file"
_ADAPTERS = "is called --lora-modules NAME=PATH or --lora-dir DIR here, and takes PEFT directories"
_NO_LIMIT = "is not needed: as many adapters are served together as fit into --memory-gib"
_FRACTION = "is called --memory-fraction here: a share of the memory that is free after the model"
_LENGTH = "is called --max-model-len here"
_REQUESTS = "is called --max-num-seqs here"
_ONE_DEVICE = "is not there: an engine has one device, and corun cluster --engines N has several"
_LAYERS = "is not there: all layers of the base model are on one device (--device)"

FOREIGN_FLAGS: Mapping[str, str] = {
    "--model": _MODEL,
    "--model-path": _MODEL,
    "-m": _MODEL,
    "-hf": _MODEL,
    "--enable-lora": "is not needed: adapters are always served (--lora-dir, --lora-modules)",
    "--lora-paths": _ADAPTERS,
    "--lora": _ADAPTERS,
    "--max-loras": _NO_LIMIT,
    "--max-loras-per-batch": _NO_LIMIT,
    "--max-cpu-loras": "is called --host-bytes here, and is a size such as 16GiB",
    "--gpu-memory-utilization": _FRACTION,
    "--mem-fraction-static": _FRACTION,
    "--context-length": _LENGTH,
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
    "--max-running-requests": _REQUESTS,
    "--parallel": _REQUESTS,
    "--chunked-prefill-size": "is called --max-num-batched-tokens here",
    "--enable-chunked-prefill": "is not needed: long prompts are always computed in chunks",
    "--enable-prefix-caching": "is not needed: --prefix-cache is on by default",
    "--disable-radix-cache": "is called --prefix-cache off here",
    "--swap-space": "is called --host-bytes here, and is a size such as 16GiB",
    "--kv-cache-dtype": "is not there: the KV cache has the type of the model (--dtype)",
    "--enforce-eager": "is called --decode-graphs off here",
    "--tensor-parallel-size": _ONE_DEVICE,
    "--tp": _ONE_DEVICE,
    "--n-gpu-layers": _LAYERS,
    "-ngl": _LAYERS,
    "--threads": "is called --cpu-threads here",
    "--tool-call-parser": "is not needed: the form of calls follows from the tokenizer's response "
    "template or from the chat template (else give --response-template FILE)",
}


def check_foreign_flags(argv: Sequence[str], own: Sequence[str]) -> None:
    """Raise ``ConfigError`` for the first flag that another server has and this command has not."""
    for word in argv:
        flag = word.split("=", 1)[0]
        if flag in FOREIGN_FLAGS and flag not in own:
            raise ConfigError(f"{flag} {FOREIGN_FLAGS[flag]}")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments and the ``command``; options that were not given are absent.

    Help, which is also the answer to an empty command line, and the version raise ``SystemExit``.
    Raises ``ConfigError`` for an unknown command or flag.
    """
    command, *rest = _joined(argv) or ["--help"]
    if command.startswith("-"):
        _answer(command)
    _check_command(command, rest)
    parser = command_parser(command)
    if command in ("serve", "cluster"):
        check_foreign_flags(rest, parser.flags())
    arguments, unknown = parser.parse_known_args(rest, argparse.Namespace(command=command))
    if unknown:
        raise ConfigError(_unknown_message(unknown[0], parser))
    return arguments


def command_parser(command: str) -> CommandParser:
    """Return the parser of a command, which has one word or two."""
    parser = CommandParser(prog=f"corun {command}", description=COMMANDS[command], examples=EXAMPLES[command])
    if command == "profile":
        _add_profile_arguments(parser)
    elif command == "check":
        _add_check_arguments(parser)
    elif command == "adapters":
        _add_adapters_arguments(parser)
    elif command == "models":
        parser.add(
            "Arguments",
            "model_types",
            metavar="MODEL_TYPE",
            nargs="*",
            help="Types as in config.json, such as qwen3; default: all.",
        )
        parser.add("Options", "--update", metavar="FILE", help="Update the table in FILE.")
    elif command == "completion":
        parser.add("Arguments", "shell", metavar="SHELL", choices=SHELLS, help=f"One of {', '.join(SHELLS)}.")
    elif command in _WITH_ENGINE_IDS:
        parser.add("Arguments", "engine_id", metavar="ENGINE", nargs="+", help=_ENGINE_HELP)
    parser.add_options(command, groups_of(command), _options(command))
    if command in _WITH_FILE:
        parser.add(
            "Server",
            "--config",
            metavar="FILE",
            help="YAML file of options. Flags and CORUN_ variables override it.",
        )
    return parser


def commands_help() -> str:
    """Return the text of ``corun --help``: the commands."""
    lines = [
        "usage: corun COMMAND [OPTION ...]",
        "",
        "Serve many LoRA adapters over one base language model.",
    ]
    for title, names in COMMAND_GROUPS.items():
        lines += ["", f"{title}:"]
        for name in names:
            lines += columns(name, COMMANDS[name].partition(". ")[0].rstrip(".") + ".", _WIDTH)
    lines += ["", "corun COMMAND --help shows the options of a command."]
    return "\n".join(lines) + "\n"


def _joined(argv: Sequence[str]) -> Sequence[str]:
    """Make one word of a command of two, which ``corun cluster MODEL`` would take for a model."""
    command = " ".join(argv[:2])
    return [command, *argv[2:]] if command in COMMANDS else argv


def _answer(flag: str) -> None:
    """Answer a flag that stands before any command."""
    if flag == "--version":
        print(f"corun {__version__}")
    elif flag in _HELP_FLAGS:
        print(commands_help(), end="")
    else:
        raise ConfigError(f"unknown option {flag} before the command (see corun --help)")
    raise SystemExit(0)


def _check_command(command: str, rest: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a command that does not exist, and for a mistyped second word."""
    if command not in COMMANDS:
        known = [] if "/" in command else [name for name in COMMANDS if " " not in name]
        near = suggestion(command, known)
        if not near and ("/" in command or Path(command).is_dir()):
            near = f"; to serve this model: corun serve {command}"
        raise ConfigError(f"unknown command {command!r}{near} (see corun --help)")
    if command == "cluster" and rest and not Path(rest[0]).exists():
        hint = " (did you mean corun cluster {}?)"
        near = near_names(rest[0], _CLUSTER_ACTIONS, hint, show=str, most=1, cutoff=_NEAR_ACTION)
        if near:
            raise ConfigError(f"unknown command 'cluster {rest[0]}'{near}")


def _options(command: str) -> list[OptionSpec]:
    if command.startswith(("cluster", "gateway")):
        specs = [spec for spec in option_specs(ClusterConfig) if command in spec.commands]
        if command == "cluster":
            engine = option_specs(EngineConfig)
            specs += [spec for spec in engine if spec.name not in NOT_FOR_CLUSTERS]
        return [*specs, *option_specs(ServeConfig)] if command in _WITH_FILE else specs
    specs = [spec for spec in option_specs(EngineConfig) if takes(spec, command)]
    if command == "serve":
        specs += option_specs(ServeConfig)
    return specs + [spec for spec in option_specs(SimulateConfig) if command in spec.commands]


def _add_profile_arguments(parser: CommandParser) -> None:
    title = "Measuring"
    parser.add(
        title,
        "--budget-s",
        metavar="X",
        help="Measure for about X seconds; a very small X is exceeded. Default: half a minute at most.",
    )
    parser.add(
        title,
        "--output",
        metavar="FILE",
        help="File to write the profile to; default: the file that corun serve reads.",
    )
    parser.add(
        title,
        "--picture",
        metavar="FILE",
        help="PNG file to draw the curves to; default: next to the profile.",
    )


def _add_check_arguments(parser: CommandParser) -> None:
    parser.add("Arguments", "adapter", metavar="ADAPTER", nargs="?", help="PEFT directory of the adapter.")
    parser.add(
        "Options",
        "--model",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="Directory or hub id of the base model; default: the packaged demo model.",
    )
    parser.add(
        "Options",
        "--text",
        metavar="FILE",
        help="Text for the comparison of --quantization; default: stories like the demo's.",
    )


def _add_adapters_arguments(parser: CommandParser) -> None:
    title = "Options"
    parser.add(
        title,
        "--url",
        metavar="URL",
        default="http://localhost:8000",
        help="URL of the server. Default: http://localhost:8000.",
    )
    parser.add(title, "--api-key", metavar="KEY", help="API key of the server; default: CORUN_API_KEY.")
    parser.add(
        title, "--level", metavar="LEVEL", help=f"Show only adapters at this level: {', '.join(LEVELS)}."
    )


_ENGINE_HELP = (
    "Engine as corun cluster status names it. corun cluster drain also takes an agent, and drains "
    "all its engines."
)


def _unknown_message(word: str, parser: CommandParser) -> str:
    flag = word.split("=", 1)[0]
    kind = "option" if flag.startswith("-") else "argument"
    near = suggestion(flag, parser.flags())
    return f"unknown {kind} {flag}{near} (see {parser.prog} --help)"
