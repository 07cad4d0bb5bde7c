"""Asks a GPU what CUDA leaves open, for about 20 minutes, and writes one report.

Each question runs in a process of its own with a time limit, since a failure here may hang for
good. A call with the report of an earlier one goes on where it stopped, and asks again what has
failed. Without a CUDA device nothing is asked, and no report written.

    python -m corun.gpu.check --report FILE
    python -m corun.gpu.check --report FILE --device cpu   # the control flow only, tiny
"""

import argparse
import sys
from pathlib import Path

from ...runtime.errors import ConfigError
from ...runtime.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from .peer import run_peer
from .questions import MACHINE, QUESTIONS, Findings, run_question
from .report import GpuReport, answer_all, find_machine


def main(arguments: list[str]) -> int:
    """Ask, or be the process of one question or a peer; return the exit code."""
    if arguments[:1] == ["--peer"]:
        role, fd, text = arguments[1:]
        run_peer(role, int(fd), text)
        return EXIT_DONE
    options = _parser().parse_args(arguments)
    if options.run is not None:
        figures = Findings(options.figures, is_shown=options.run != MACHINE.name)
        run_question(options.run, options.kind, options.limit_s, figures)
        return EXIT_DONE
    if options.report is None:
        print("python -m corun.gpu.check: --report FILE is missing", file=sys.stderr)
        return EXIT_USAGE
    try:
        if not options.report.absolute().parent.is_dir():
            raise ConfigError(f"--report {options.report}: its folder does not exist")
        report = GpuReport(options.report, options.device, find_machine(options.device))
    except ConfigError as error:
        print(f"python -m corun.gpu.check: {error}", file=sys.stderr)
        return EXIT_USAGE
    answer_all(report, options.device, options.questions)
    print(f"{report.values['status']}: {options.report}", flush=True)
    return EXIT_DONE if report.values["status"] == "answered" else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    names = [question.name for question in QUESTIONS]
    parser = argparse.ArgumentParser(
        prog="python -m corun.gpu.check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--report", type=Path, help="JSON file for the answers, continued if it exists")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--questions", nargs="+", choices=names, default=names, help="default: all of them")
    for name, kind in (("--run", str), ("--kind", str), ("--limit-s", float), ("--figures", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # of a question's process
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
