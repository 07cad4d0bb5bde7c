"""``corun completion``: a script with which a shell completes commands, flags and their values."""

import argparse
from collections.abc import Iterable, Iterator

from .command_texts import COMMANDS
from .parser import command_parser

_BASH = r"""_corun() {
    local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""
    case "$command ${COMP_WORDS[2]}" in
        @TWO_WORDS@) command="$command ${COMP_WORDS[2]}" ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="@COMMANDS@"
    else
        case "$command" in
@FLAGS@
        esac
        case "${COMP_WORDS[COMP_CWORD-1]}" in
@VALUES@
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _corun corun"""

_ZSH = r"""#compdef corun
_corun() {
    local command="${words[2]}" found=""
    case "$command ${words[3]}" in
        (@TWO_WORDS@) command="$command ${words[3]}" ;;
    esac
    if (( CURRENT == 2 )); then
        found="@COMMANDS@"
    else
        case "$command" in
@FLAGS@
        esac
        case "${words[CURRENT-1]}" in
@VALUES@
        esac
    fi
    if [[ -n "$found" && ( CURRENT -eq 2 || "${words[CURRENT]}" == -* || "$found" != -* ) ]]; then
        compadd -- ${=found}
    else
        _files
    fi
}
compdef _corun corun"""


def run(arguments: argparse.Namespace) -> int:
    """Print the script for the shell."""
    parsers = {name: command_parser(name) for name in COMMANDS}
    flags = {name: [*parser.flags(), "--help", "--help-all"] for name, parser in parsers.items()}
    flags["cluster"] += [name.split()[1] for name in COMMANDS if name.startswith("cluster ")]
    values: dict[str, tuple[str, ...]] = {}
    for parser in parsers.values():
        values |= parser.choices()
    if arguments.shell == "fish":
        lines = list(_fish(flags, values))
    else:
        template, name = (_BASH, "words") if arguments.shell == "bash" else (_ZSH, "found")
        lines = [_filled(template, name, flags, values)]
    print("\n".join(lines))
    return 0


def _filled(
    template: str, variable: str, flags: dict[str, list[str]], values: dict[str, tuple[str, ...]]
) -> str:
    two_words = [f'"{name}"' for name in COMMANDS if " " in name]
    by_mark = {
        "@TWO_WORDS@": "|".join(two_words),
        "@COMMANDS@": " ".join(_first_words()),
        "@FLAGS@": "\n".join(_cases(variable, flags)),
        "@VALUES@": "\n".join(_cases(variable, values)),
    }
    for mark, text in by_mark.items():
        template = template.replace(mark, text)
    return template


def _cases(variable: str, words: "dict[str, list[str]] | dict[str, tuple[str, ...]]") -> Iterator[str]:
    for name, some in words.items():
        yield f'            ("{name}") {variable}="{" ".join(some)}" ;;'


def _fish(flags: dict[str, list[str]], values: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for name in _first_words():
        yield f"complete -c corun -n __fish_use_subcommand -xa {name} -d {_quoted(COMMANDS[name])}"
    for name, some in flags.items():
        condition = f"-n '__fish_seen_subcommand_from {name.split()[-1]}'"
        for flag in some:
            if flag.startswith("--"):
                wanted = f" -xa '{' '.join(values[flag])}'" if flag in values else ""
                yield f"complete -c corun {condition} -l {flag[2:]}{wanted}"
            elif not flag.startswith("-"):
                yield f"complete -c corun {condition} -xa {flag}"


def _first_words() -> Iterable[str]:
    return [name for name in COMMANDS if " " not in name]


def _quoted(text: str) -> str:
    return "'" + text.partition(". ")[0].rstrip(".").replace("'", "\\'") + "'"
