"""The console script ``corun``: runs one command and turns errors into exit codes.

The only place where logging is configured. The codes are in ``runtime/exit_codes.py``.

An interrupt ends the process at once, which a shell shows as 130, except inside ``in_order`` and
while a server runs. So this module loads next to nothing before ``console`` has set that up.
"""

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from ..exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_UNREAD, EXIT_USAGE

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from ..errors import CorunError

_COMMAND_MODULES = {
    "serve": ".serve",
    "profile": ".profile",
    "simulate": ".simulate",
    "plan": ".plan",
    "check": ".check",
    "models": ".models",
    "adapters": ".adapters",
    "cluster": ".cluster",
    "cluster status": ".cluster_asks",
    "cluster add": ".cluster_asks",
    "cluster remove": ".cluster_asks",
    "cluster drain": ".cluster_asks",
    "gateway": ".gateway",
    "env": ".env",
    "completion": ".completion",
}


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM has arrived: work is abandoned as for an interrupt."""


def console() -> NoReturn:
    """Run the process's command line and end the process: the ``corun`` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ...cpu_workers.process_life import exit_process

    try:
        code = main()
    except BrokenPipeError:
        if not _is_unread():
            raise  # another pipe, which ends by a bug
        code = EXIT_UNREAD
    exit_process(code)


@contextmanager
def in_order() -> "Iterator[None]":
    """Have SIGINT and SIGTERM raise ``KeyboardInterrupt`` inside the block.

    For work that must be undone before the process ends. A signal that has a handler keeps it.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _terminate}
    ours = [number for number in handlers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run the command line ``argv`` (default: the process's) and return the exit code."""
    from ..errors import CorunError
    from .parser import parse_arguments

    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        debug = vars(arguments).get("log_level") == "debug"
        configure_logging("debug" if debug else "info")
        return _run_command(arguments)
    except CorunError as error:
        return _report(error)
    except KeyboardInterrupt as interrupt:
        return _code_of(interrupt)


def configure_logging(level: str) -> None:
    """Send log records of ``level`` and above to stderr, one line each."""
    import logging

    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def _terminate(*_: object) -> NoReturn:
    raise _TerminatedError


def _code_of(interrupt: KeyboardInterrupt) -> int:
    return EXIT_TERMINATED if isinstance(interrupt, _TerminatedError) else EXIT_INTERRUPTED


def _is_unread() -> bool:
    """Whether the reader of this process's output has ended, as ``head`` does."""
    import select

    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream, 0)  # errors are reported without it
    return bool(poll.poll(0))


def _run_command(arguments: "argparse.Namespace") -> int:
    import importlib

    from ..errors import ConfigError

    # Imported by name, so that a command loads only its own libraries.
    try:
        module = importlib.import_module(_COMMAND_MODULES[arguments.command], __package__)
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError(f"corun {arguments.command} needs aiohttp: pip install 'corun[cluster]'") from None
    code = module.run(arguments)
    assert isinstance(code, int)
    return code


def _report(error: "CorunError") -> int:
    import logging

    from ..errors import ConfigError

    if logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger(__name__).error("the command failed", exc_info=error)
    print(f"corun: error: {error}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
