"""A process that is kept running: started again when it ends by itself, ended in time."""

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Callable

from ..process import ended, exit_words, spawn
from ..settings import ProcessSettings

_RESTART_AFTER_S = (0.0, 0.5, 1.0, 5.0)  # by how often in a row
_LASTING_S = 30.0  # after so long a run the next delay is the first

_logger = logging.getLogger(__name__)


class SupervisedProcess:
    """One of a cluster's own. On one event loop."""

    def __init__(self, module: str, settings: ProcessSettings) -> None:
        self._name = settings.process_name
        self._module = module
        self._settings = settings
        self._is_wanted = True
        self._process: subprocess.Popen[bytes] | None = None
        self._supervising: asyncio.Task[None] | None = None

    def start(self, on_exit: Callable[[int], bool]) -> None:
        """Start it; ``on_exit`` gets the status of an unasked exit; True starts it again."""
        self._process = self._spawn()
        self._supervising = asyncio.ensure_future(self._supervise(self._process, on_exit))

    async def end(self, timeout_s: float) -> None:
        """Ask it to end, and kill it if it has not in time. Idempotent."""
        self._is_wanted = False
        if self._supervising is None or self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._supervising], timeout=timeout_s)
        if not done:
            _logger.warning("the %s does not end, and is killed", self._name)
            self.kill()
            await self._supervising

    def kill(self) -> None:
        """End it at once; ``end`` reaps it."""
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
                "the %s ended (%s), and starts again in %g s", self._name, exit_words(status),
                after_s,
            )  # fmt: skip
            await asyncio.sleep(after_s)
            if not self._is_wanted:
                return
            try:
                process = self._process = self._spawn()
            except OSError as error:  # the machine may have room for it later
                _logger.error("the %s cannot be started: %s", self._name, error)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        return spawn(self._module, settings=self._settings)
