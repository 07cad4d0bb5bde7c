"""The console script ``corun``: runs one command and turns errors into exit codes.

The only place where logging is configured. Exit codes: 0 done, 1 it failed, 2 an option or a
configuration file is wrong, 130 interrupted.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from ...cpu_workers.process_life import leave
from ..errors import ConfigError, CorunError
from .parser import parse_arguments

_COMMAND_MODULES = {
    "serve": ".serve",
    "profile": ".profile",
    "simulate": ".simulate",
    "plan": ".plan",
    "check": ".check",
    "adapters": ".adapters",
    "env": ".env",
    "options": ".options",
}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def console() -> NoReturn:
    """Run the process's command line and end the process: the ``corun`` command."""
    leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit code."""
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        debug = vars(arguments).get("log_level") == "debug"
        configure_logging("debug" if debug else "info")
        return _run_command(arguments)
    except CorunError as error:
        return _report(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def configure_logging(level: str) -> None:
    """Send log records of ``level`` and above to stderr, one line each."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def _run_command(arguments: argparse.Namespace) -> int:
    # Imported by name so that a command loads its own libraries and no other's.
    module = importlib.import_module(_COMMAND_MODULES[arguments.command], __package__)
    code = module.run(arguments)
    assert isinstance(code, int)
    return code


def _report(error: CorunError) -> int:
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger(__name__).error("the command failed", exc_info=error)
    print(f"corun: error: {error}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
