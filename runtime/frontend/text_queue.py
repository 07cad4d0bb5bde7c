"""The queue of texts that are tokenized beside the event loop: bounded, and fair.

Two threads do the work, one of them for long texts only, so that short texts never wait for these.
In each, connections take turns by the characters that they have had (self-clocked fair queueing):
a connection with many texts, or with a long text in pieces, delays any other connection by one
piece at most. Belongs to one event loop. Knows nothing of tokenizers.
"""

import asyncio
import contextlib
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from ..limits import check_waiting_chars

MAX_SHORT_CHARS = 32_768  # of a text that does not wait for longer ones
_MAX_LOOP_CHARS = 16_384  # of texts that one turn of the event loop tokenizes itself
_CHARS_PER_S = 1e6  # at first
_LEARNING_RATE = 0.2
_MIN_OBSERVED_CHARS = 1024
_MAX_RETRY_AFTER_S = 3600

_T = TypeVar("_T")


class _Flow:
    """The texts of one connection, which take turns with those of others."""

    __slots__ = ("finish",)

    def __init__(self) -> None:
        self.finish = 0.0  # virtual time at which its last job ends, in characters


_flow: ContextVar[_Flow] = ContextVar("_flow")


def begin_flow() -> None:
    """Texts of this context, and of contexts copied from it, take turns as one connection."""
    _flow.set(_Flow())


class _Waiting:
    """Characters of texts that are admitted and not yet done."""

    def __init__(self) -> None:
        self.num_chars = 0  # memory
        self.num_worked = 0  # those of them that are tokenized, not refused before


class _Job:
    __slots__ = ("future", "num_chars", "work")

    def __init__(self, work: Callable[[], Any], num_chars: int) -> None:
        self.work: Callable[[], Any] | None = work
        self.num_chars = num_chars
        self.future: Future[Any] = Future()


class _Thread:
    """One thread, and the jobs that wait for it, by virtual time of their end."""

    def __init__(self, name: str) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.jobs: list[tuple[float, int, _Job]] = []


class TextQueue:
    """Texts that wait to be tokenized, and the threads that do it."""

    def __init__(self, max_waiting_chars: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """``max_waiting_chars``: of all short texts, and of all long ones; one may have more."""
        self._clock = clock
        self._max_chars = max_waiting_chars
        self._waiting = _Waiting(), _Waiting()  # short and long texts: neither shuts the other out
        self._num_loop_chars = 0  # in this turn of the event loop
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._now = 0.0  # virtual time: the end of the job that began last
        self._threads: tuple[_Thread, _Thread] | None = None
        self._chars_per_s = _CHARS_PER_S

    def close(self) -> None:
        """Cancel what waits, and end the threads. Idempotent."""
        threads, self._threads = self._threads, None
        for thread in threads or ():
            thread.pool.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                jobs, thread.jobs = thread.jobs, []
            for _, _, job in jobs:
                job.future.cancel()

    def takes_on_loop(self, num_chars: int) -> bool:
        """Whether the event loop may tokenize a text itself; counts it if so."""
        if self._num_loop_chars == 0:
            asyncio.get_running_loop().call_soon(self._end_turn)
        if self._num_loop_chars + num_chars > _MAX_LOOP_CHARS:
            return False
        self._num_loop_chars += max(1, num_chars)
        return True

    def _end_turn(self) -> None:
        self._num_loop_chars = 0

    @contextlib.contextmanager
    def admitted(self, num_chars: int, num_worked: int | None = None) -> Iterator[None]:
        """Count a text as waiting. Raises ``OverloadedError`` if too much waits already.

        ``num_worked``: the characters that are probably tokenized; None = all.
        """
        waiting = self._waiting[num_chars > MAX_SHORT_CHARS]
        check_waiting_chars(
            waiting.num_chars,
            num_chars,
            max_waiting_chars=self._max_chars,
            retry_after_s=self._retry_after_s(waiting),
        )
        num_worked = num_chars if num_worked is None else num_worked
        waiting.num_chars += num_chars
        waiting.num_worked += num_worked
        try:
            yield
        finally:  # also if the client has left
            waiting.num_chars -= num_chars
            waiting.num_worked -= num_worked

    async def run(self, work: Callable[[], _T], num_chars: int, *, is_long: bool) -> _T:
        """Return the result of ``work``, which a thread calls when it is its turn.

        Cancellation removes work that has not begun.
        """
        job = _Job(work, num_chars)
        self._submit(job, is_long=is_long)
        try:
            result: _T = await asyncio.wrap_future(job.future)
            return result
        except asyncio.CancelledError:
            job.future.cancel()
            job.work = None  # it holds the text
            raise
        finally:
            del job  # an error's traceback has this frame: a cycle would keep the text

    def _submit(self, job: _Job, *, is_long: bool) -> None:
        if self._threads is None:
            self._threads = _Thread("corun-tokenizer"), _Thread("corun-tokenizer-long")
        thread = self._threads[is_long]
        flow = _flow.get(None) or _Flow()
        with self._lock:
            flow.finish = max(self._now, flow.finish) + job.num_chars
            heapq.heappush(thread.jobs, (flow.finish, next(self._numbers), job))
        thread.pool.submit(self._run_next, thread)

    def _run_next(self, thread: _Thread) -> None:
        """Run the next job of ``thread`` in its thread; it is called once for each."""
        with self._lock:
            if not thread.jobs:  # closed
                return
            finish, _, job = heapq.heappop(thread.jobs)
            self._now = max(self._now, finish)
        work = job.work  # read first: cancellation removes it
        if not job.future.set_running_or_notify_cancel():
            return
        num_chars, began_s = job.num_chars, self._clock()
        try:
            assert work is not None
            job.future.set_result(work())
        except BaseException as error:
            job.future.set_exception(error)
        del job, work  # as in ``run``
        self._observe(num_chars, self._clock() - began_s)

    def _observe(self, num_chars: int, took_s: float) -> None:
        if num_chars >= _MIN_OBSERVED_CHARS:
            rate = num_chars / max(took_s, 1e-6)
            self._chars_per_s += _LEARNING_RATE * (rate - self._chars_per_s)

    def _retry_after_s(self, waiting: _Waiting) -> int:
        """Seconds until all that waits is done, at the rate of the last texts."""
        seconds = math.ceil(waiting.num_worked / self._chars_per_s)
        return min(max(1, seconds), _MAX_RETRY_AFTER_S)
