"""The console script ``corun``: runs one command and turns errors into exit codes.

The only place where logging is configured. Exit codes: 0 done, 1 it failed, 2 an option or a
configuration file is wrong, 130 interrupted, 141 nobody reads what it says any more.
"""

import argparse
import importlib
import logging
import select
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
    "cluster": ".cluster",
    "cluster status": ".cluster_asks",
    "cluster add": ".cluster_asks",
    "cluster remove": ".cluster_asks",
    "cluster drain": ".cluster_asks",
    "gateway": ".gateway",
    "env": ".env",
    "options": ".options",
}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141  # as a shell shows it of a process that SIGPIPE has ended


def console() -> NoReturn:
    """Run the process's command line and end the process: the ``corun`` command."""
    try:
        code = main()
    except BrokenPipeError:
        if not _is_unread():
            raise  # another pipe, which it is a mistake not to have waited for
        code = EXIT_UNREAD
    leave(code)


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


def _is_unread() -> bool:
    """Whether what reads this process's output has ended, as ``head`` does."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream, 0)  # errors are told anyway
    return bool(poll.poll(0))


def _run_command(arguments: argparse.Namespace) -> int:
    # Imported by name so that a command loads its own libraries and no other's.
    try:
        module = importlib.import_module(_COMMAND_MODULES[arguments.command], __package__)
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError(
            f"corun {arguments.command} needs aiohttp: pip install 'corun[cluster]'"
        ) from None
    code = module.run(arguments)
    assert isinstance(code, int)
    return code


def _report(error: CorunError) -> int:
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger(__name__).error("the command failed", exc_info=error)
    print(f"corun: error: {error}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
