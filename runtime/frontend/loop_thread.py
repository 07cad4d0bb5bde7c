"""An event loop in a thread of its own, for callers without one or that must not block theirs.

Knows nothing of what runs on it. It changes no global state: no signal handlers, no asyncio policy,
no other event loop.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from ..errors import EngineDeadError
from ..tasks import cancel_all

THREAD_PREFIX = "corun-"  # of the names of all threads of an engine

_Result = TypeVar("_Result")

_logger = logging.getLogger(__name__)


class LoopThread:
    """Runs coroutines for any thread until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        # Its own executor can be ended at interpreter exit, when no thread can be started for it.
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix=f"{THREAD_PREFIX}front-end-helper"
        )
        self._loop.set_default_executor(self._pool)
        self._lock = threading.RLock()  # guards _is_closing: nothing runs after it is set
        self._is_closing = False
        # A daemon, so that an engine left open does not keep the interpreter from ending.
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_PREFIX}front-end", daemon=True
        )
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run ``coroutine`` to its end and return its result; an interrupt cancels it.

        Raises ``EngineDeadError`` after ``close``, and if ``close`` comes before the result.
        """
        with self._lock:
            if self._is_closing:
                coroutine.close()
                raise EngineDeadError("the engine is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineDeadError("the engine is closed") from None
        finally:
            future.cancel()  # no effect if it has ended

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run ``last``, cancel all other tasks and end the thread. Idempotent.

        Waits for the end, unless it is called by a thread of an engine that drops the last
        reference: the end may be waiting for that thread.
        """
        with self._lock:
            if self._is_closing:
                last.close()
            else:
                self._is_closing = True
                asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        if not threading.current_thread().name.startswith(THREAD_PREFIX):
            self._thread.join()

    async def _end(self, last: Awaitable[None]) -> None:
        try:
            await last
        except Exception:
            _logger.exception("the engine has ended, but freeing its resources failed")
        await cancel_all(*(asyncio.all_tasks() - {asyncio.current_task()}))
        await self._loop.shutdown_asyncgens()
        await asyncio.sleep(0)  # lets transports that were just closed report it
        self._loop.stop()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_forever()
            self._pool.shutdown()
