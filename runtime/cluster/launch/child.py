"""A supervised process: restarted when it exits, and killed if it does not end in time."""

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Callable

from ..process import ended, exit_words, spawn
from ..settings import ProcessSettings

_RESTART_AFTER_S = (0.0, 0.5, 1.0, 5.0)  # by restarts in a row
_LASTING_S = 30.0  # after so long a run delays start over

_logger = logging.getLogger(__name__)


class SupervisedProcess:
    """A process of a cluster. On one event loop."""

    def __init__(self, module: str, settings: ProcessSettings) -> None:
        self._name = settings.process_name
        self._module = module
        self._settings = settings
        self._is_wanted = True
        self._process: subprocess.Popen[bytes] | None = None
        self._supervising: asyncio.Task[None] | None = None

    def start(self, on_exit: Callable[[int], bool]) -> None:
        """Start the process. ``on_exit`` gets the status of an exit; True restarts it."""
        self._process = self._spawn()
        self._supervising = asyncio.ensure_future(self._supervise(self._process, on_exit))

    async def end(self, timeout_s: float) -> None:
        """End the process, and kill it if it takes too long. Idempotent."""
        self._is_wanted = False
        if self._supervising is None or self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._supervising], timeout=timeout_s)
        if not done:
            _logger.warning("the %s process does not end; killing it", self._name)
            self.kill()
            await self._supervising

    def kill(self) -> None:
        """Kill the process; ``end`` reaps it."""
        self._is_wanted = False
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    async def _supervise(
        self, process: "subprocess.Popen[bytes]", on_exit: Callable[[int], bool]
    ) -> None:
        tries = 0
        while True:
            started_s = time.monotonic()
            status = await ended(process)
            if not self._is_wanted or not on_exit(status):
                return
            tries = 0 if time.monotonic() - started_s >= _LASTING_S else tries
            after_s = _RESTART_AFTER_S[min(tries, len(_RESTART_AFTER_S) - 1)]
            tries += 1
            _logger.warning(
                "the %s process ended (%s); restarting it in %g s", self._name, exit_words(status),
                after_s,
            )  # fmt: skip
            await asyncio.sleep(after_s)
            if not self._is_wanted:
                return
            try:
                process = self._process = self._spawn()
            except OSError as error:  # a later try may succeed
                _logger.error("cannot start the %s process (will retry): %s", self._name, error)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        return spawn(self._module, settings=self._settings)
