"""Tries structured output in a process beside the front end, before the engine sees it.

Results are cached. Belongs to one event loop, which never waits for a compilation.
"""

import asyncio
import contextlib
import hashlib
import os
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


class _Process:
    """A process that tries grammars, and its end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                 popen: "subprocess.Popen[bytes]") -> None:  # fmt: skip
        self._reader, self._writer, self._popen = reader, writer, popen

    @classmethod
    async def start(cls, vocabulary: GrammarTokens) -> "_Process":
        """Start it and wait until it is ready. Raises ``OverloadedError`` if it takes too long."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", f"{__package__}.process"]
            command += ["--fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
            with signals_held():
                popen = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
                )
        process = cls(*await asyncio.open_connection(sock=ours), popen)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await process.exchange(vocabulary)
        except (OSError, EOFError, TimeoutError) as error:
            await process.close()
            raise OverloadedError(
                f"the process that checks structured output has not started: {error!r}"
            ) from None
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

    async def close(self) -> None:
        """Kill it. Idempotent."""
        self._popen.kill()
        self._writer.close()
        await asyncio.to_thread(self._popen.wait)  # the system frees its memory


class _Trial:
    """A text that is tried or waits for its turn, and the requests that wait for it."""

    def __init__(self, task: "asyncio.Task[str | None]") -> None:
        self.task = task
        self.num_waiting = 0
        self.has_begun = False


class GrammarTrials:
    """Tries each text once. ``close`` it in the end."""

    def __init__(self, vocabulary: Callable[[], GrammarTokens], *, timeout_s: float = 1.0) -> None:
        """``vocabulary``: called when a process starts, which is at the first trial."""
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._process: _Process | None = None
        self._turn = asyncio.Lock()
        self._trials: dict[bytes, _Trial] = {}
        self._results: OrderedDict[bytes, str | None] = OrderedDict()  # reasons of refusals
        self._is_closed = False

    async def check(self, structured: StructuredOutput) -> None:
        """Raise ``RequestError`` if it cannot be served, ``OverloadedError`` if too many wait."""
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
        if self._process is not None:
            await self._process.close()
            self._process = None

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
            with contextlib.suppress(OSError, EOFError):  # the process was killed: once more
                return self._cached(key, await self._try(structured))
            try:
                reason = await self._try(structured)
            except (OSError, EOFError):
                reason = (
                    f"{structured.field} cannot be served: compiling it needs too much memory, "
                    "or it is nested too deeply"
                )
            return self._cached(key, reason)

    async def _try(self, structured: StructuredOutput) -> str | None:
        """Return the reason of a refusal. Raises ``OSError`` or ``EOFError`` after a crash."""
        if self._process is None:
            self._process = await _Process.start(self._vocabulary())
        process, self._process = self._process, None
        try:
            async with asyncio.timeout(self._timeout_s):
                reason = await process.exchange(structured)
        except TimeoutError:
            await process.close()
            return (
                f"{structured.field} cannot be served: compiling it takes more than "
                f"{self._timeout_s:g} s"
            )
        except BaseException:
            await process.close()
            raise
        self._process = process
        return reason

    def _cached(self, key: bytes, reason: str | None) -> str | None:
        self._results[key] = reason
        if len(self._results) > _MAX_RESULTS:
            self._results.popitem(last=False)
        return reason
