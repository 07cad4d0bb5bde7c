"""Tries structured output in a process beside the front end, before the engine sees it.

Results are cached. Belongs to one event loop, which never waits for a compilation.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from ...cpu_workers.process_life import signals_held
from ..errors import EngineDeadError, OverloadedError, RequestError
from ..sampling import StructuredOutput
from ..tasks import cancel_all
from .messages import LENGTH_BYTES, GrammarTokens, frame

_MAX_RESULTS = 1024
_MAX_WAITING = 256  # different texts
_MAX_WAIT_S = 10.0  # of one, with those before it
_START_TIMEOUT_S = 30.0
_KILL_WAIT_S = 5.0
_WORKED_SHARE = 1 / 16  # of the deadline: with less processor time, the machine is busy
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # of memory, and of the stack


class _Process:
    """A process that tries grammars, and its end of the socket pair."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, popen: "subprocess.Popen[bytes]"
    ) -> None:
        self._reader, self._writer, self._popen = reader, writer, popen

    @classmethod
    async def start(cls, tokens: GrammarTokens) -> "_Process":
        """Start it and wait until it is ready. Raises ``OverloadedError`` if it takes too long."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", f"{__package__}.process"]
            command += ["--fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
            try:
                with signals_held():
                    popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
            except OSError as error:
                ours.close()
                raise _not_started(error) from None
        process = cls(*await asyncio.open_connection(sock=ours), popen)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await process.exchange(tokens)
        except (OSError, EOFError, TimeoutError) as error:
            await process.close()
            raise _not_started(error) from None
        except BaseException:
            await process.close()
            raise
        return process

    async def exchange(self, message: object) -> str | None:
        """Send a message and return the answer. Raises ``OSError`` or ``EOFError`` at its end."""
        self._writer.write(frame(message))
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
        payload = await self._reader.readexactly(length)
        return msgspec.msgpack.decode(payload, type=str | None)

    def cpu_s(self) -> float:
        """Return the seconds of processor time that it has had; it may have ended."""
        import psutil  # which a server without structured output does not need

        try:
            times = psutil.Process(self._popen.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    async def close(self) -> int:
        """Kill it, if it has not ended, and return its status. Idempotent."""
        self._popen.kill()
        self._writer.close()
        try:  # the system frees its memory
            return await asyncio.to_thread(self._popen.wait, _KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL


def _not_started(error: Exception) -> OverloadedError:
    return OverloadedError(f"the process that tries structured output has not started: {error!r}")


class _Trial:
    """A text that is tried or waits for its turn, and the requests that wait for it."""

    def __init__(self, task: "asyncio.Task[str | None]") -> None:
        self.task = task
        self.num_waiting = 0
        self.has_begun = False


class GrammarTrials:
    """Tries each text once. ``close`` it in the end."""

    def __init__(self, tokens: Callable[[], GrammarTokens], *, timeout_s: float = 0.8) -> None:
        """``tokens``: called when a process starts, which is at the first trial."""
        self._tokens = tokens
        self._timeout_s = timeout_s
        self._starting: asyncio.Task[_Process] | None = None  # the process, perhaps started
        self._turn = asyncio.Lock()
        self._trials: dict[bytes, _Trial] = {}
        self._results: OrderedDict[bytes, str | None] = OrderedDict()  # reasons of refusals
        self._is_closed = False

    async def check(self, structured: StructuredOutput) -> None:
        """Raise ``RequestError`` if it cannot be served.

        Raises ``OverloadedError`` if too many wait, or the machine is too busy.
        """
        text = f"{structured.kind}\0{structured.field}\0{structured.text}"
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if key in self._results:
            self._results.move_to_end(key)
            reason = self._results[key]
        else:
            reason = await self._result_of(key, structured)
        if reason is not None:
            raise RequestError(reason, param=structured.field)

    async def close(self) -> None:
        """End the process; waiting requests get ``EngineDeadError``. Idempotent."""
        self._is_closed = True
        await cancel_all(*(trial.task for trial in self._trials.values()))
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()  # no effect once it has started
            with contextlib.suppress(asyncio.CancelledError, OverloadedError):
                await (await starting).close()

    async def _result_of(self, key: bytes, structured: StructuredOutput) -> str | None:
        trial = self._trials.get(key) or self._begin(key, structured)
        trial.num_waiting += 1
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                return await asyncio.shield(trial.task)
        except TimeoutError:
            raise OverloadedError(
                f"{structured.field} waited {_MAX_WAIT_S:g} s for others to be compiled"
            ) from None
        except asyncio.CancelledError:
            if self._is_closed:
                raise EngineDeadError("the engine was shut down") from None
            raise
        finally:
            trial.num_waiting -= 1
            if trial.num_waiting == 0 and not trial.has_begun:  # the clients have left
                self._end(key, trial)

    def _begin(self, key: bytes, structured: StructuredOutput) -> _Trial:
        if self._is_closed:
            raise EngineDeadError("the engine was shut down")
        if len(self._trials) >= _MAX_WAITING:
            raise OverloadedError(
                f"{_MAX_WAITING} other schemas and grammars wait to be compiled; retry later"
            )
        task = asyncio.get_running_loop().create_task(self._run(key, structured))
        trial = self._trials[key] = _Trial(task)
        task.add_done_callback(lambda _: self._end(key, trial))
        return trial

    def _end(self, key: bytes, trial: _Trial) -> None:
        """Forget a trial that has ended, or that nothing waits for."""
        if self._trials.get(key) is trial:
            del self._trials[key]
        if not trial.task.done():
            trial.task.cancel()
        elif not trial.task.cancelled():
            trial.task.exception()  # no request may be there to receive it

    async def _run(self, key: bytes, structured: StructuredOutput) -> str | None:
        """Try a text when it is its turn, and cache the result."""
        async with self._turn:
            self._trials[key].has_begun = True
            try:
                reason = await self._try(structured)
            except (OSError, EOFError):  # the process was killed, by no fault of the text
                reason = await self._try(structured)
            self._results[key] = reason
            if len(self._results) > _MAX_RESULTS:
                self._results.popitem(last=False)
            return reason

    async def _try(self, structured: StructuredOutput) -> str | None:
        """Return the reason of a refusal.

        Raises ``OSError`` or ``EOFError`` if the process was killed, ``OverloadedError`` if it does
        not start, or had no time.
        """
        process = await self._started()
        began_cpu_s = process.cpu_s()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await process.exchange(structured)
        except TimeoutError:
            has_worked = process.cpu_s() - began_cpu_s > self._timeout_s * _WORKED_SHARE
            await self._replace(process)
            if not has_worked:  # by no fault of the text
                raise OverloadedError(
                    f"the machine is too busy to compile {structured.field} within "
                    f"{self._timeout_s:g} s; retry later"
                ) from None
            return f"{structured.field} cannot be served: compiling it takes more than {self._timeout_s:g} s"
        except (OSError, EOFError):
            if -await self._replace(process) not in _CRASHES:
                raise
            return (
                f"{structured.field} cannot be served: compiling it needs too much memory, or it "
                "is nested too deeply"
            )
        except BaseException:
            self._starting = None
            await process.close()
            raise

    async def _started(self) -> _Process:
        """Return the process. Raises ``OverloadedError`` if it does not start."""
        if self._starting is None:
            self._start()
        assert self._starting is not None
        try:
            return await asyncio.shield(self._starting)
        except OverloadedError:
            self._starting = None  # the next trial starts another
            raise

    async def _replace(self, process: _Process) -> int:
        """End the process and return its status; another one starts, for the next text."""
        self._start()
        return await process.close()

    def _start(self) -> None:
        self._starting = asyncio.get_running_loop().create_task(_Process.start(self._tokens()))
