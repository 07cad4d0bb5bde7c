"""Start and end of a cluster's processes: ``python -P -m MODULE``, with settings on stdin.

They end when the process that started them ends, and never import the user's main module. They
ignore SIGINT, which a terminal sends to all of them: the parent ends them in order, by SIGTERM. The
exit status is 0 after that, 2 for an error that only a user can fix, otherwise 1.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn, TypeVar

import msgspec

from ...cpu_workers.process_life import (
    OrphanError,
    die_with_parent,
    exit_process,
    ignore_interrupts,
    signals_held,
)
from ..errors import ConfigError, CorunError
from ..exit_codes import EXIT_FAILED, EXIT_USAGE
from .settings import ProcessSettings

_PARENT_VARIABLE = "_CORUN_PARENT_PID"  # a variable, since the command parses the arguments

_Settings = TypeVar("_Settings", bound=ProcessSettings)

_logger = logging.getLogger(__name__)


def spawn(
    module: str,
    *arguments: str,
    settings: msgspec.Struct | None = None,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start ``module`` as a process that ends with the calling thread. Raises ``OSError``."""
    with signals_held():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module.removesuffix(".__main__"), *arguments],
            stdin=subprocess.DEVNULL if settings is None else subprocess.PIPE,
            env={**(os.environ if environment is None else environment), _PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
    if settings is not None:
        assert process.stdin is not None
        try:
            with process.stdin:
                process.stdin.write(msgspec.json.encode(settings))
        except BrokenPipeError:
            pass  # it has ended; the caller sees its status
    return process


async def ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait until ``process`` has ended, and reap it; return its exit status, or -signal."""
    if process.poll() is None:
        loop = asyncio.get_running_loop()
        has_ended = asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, has_ended.set)
        try:
            await has_ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    return process.wait()


def exit_words(status: int) -> str:
    """Describe how a process ended."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name}"


def bind_to_parent() -> None:
    """End this process when the thread that called ``spawn`` ends, at once if it is gone.

    From now on SIGTERM ends this process, and SIGINT does nothing.
    """
    try:
        die_with_parent(int(os.environ.pop(_PARENT_VARIABLE)))
    except OrphanError:
        exit_process(EXIT_FAILED)
    ignore_interrupts()


def run_process(
    kind: type[_Settings],
    run: Callable[[_Settings, asyncio.Event], Awaitable[int | None]],
    *,
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    is_bound: bool = True,
) -> NoReturn:
    """Run a process that ``spawn`` started; SIGTERM sets the event of ``run``.

    ``run`` returns the exit status if it has logged the error itself. Without
    ``is_bound`` its parent may end before it.
    """
    if is_bound:
        bind_to_parent()
    else:
        ignore_interrupts()
    try:
        settings = _read_settings(kind)
        logging.basicConfig(
            level=settings.log_level.upper(),
            format=f"%(asctime)s %(levelname)-7s {kind.process_name}: %(message)s",
            stream=sys.stderr,
        )
        with asyncio.Runner(loop_factory=make_loop) as runner:
            status = runner.run(_until_signal(settings, run))
    except CorunError as error:
        sys.stderr.write(f"corun: error: {error}\n")
        exit_process(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED)
    except Exception:
        _logger.exception("internal error; exiting")
        exit_process(EXIT_FAILED)
    exit_process(status or os.EX_OK)


async def _until_signal(
    settings: _Settings, run: Callable[[_Settings, asyncio.Event], Awaitable[int | None]]
) -> int | None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return await run(settings, stop)


def _read_settings(kind: type[_Settings]) -> _Settings:
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"standard input holds no {kind.__name__}: {error}") from None
