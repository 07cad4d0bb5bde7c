"""Memory in huge pages, for what every step reads from end to end.

In pages of 4 KiB the processor's own prefetching stops at each, and translating addresses takes
its share: reading 256 MiB with two threads of a Zen 4 went at 28 to 30 GB/s, in huge pages at 30
to 33.

A virtual machine that reports its free memory to its host gets it back with the first touch: 5 to
6 ms for 2 MiB on Firecracker, where 0.2 ms would do. Smaller pages come from what the machine has
kept. So where huge pages turn out to come slowly, what is asked for next gets small ones, which
are made huge in the background.
"""

import collections
import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from ..shm.arena_pages import HUGE_PAGE_BYTES, madvise

_LOG = logging.getLogger(__name__)

# A last huge page that is filled in part is taken if it holds at most this share of the whole in
# vain.
_MAX_WASTED_SHARE = 1 / 16

_SLOW_TOUCH_S = 1e-3  # 2 GB/s, where memory that is there is cleared at 8 and more
_MAX_SLOW_TOUCHES = 3  # in a row, of first pages
_MADV_COLLAPSE = 25  # since Linux 6.1
# Of a core's time, while there is work to do and while there is none. At a half, steps took 1.6
# times as long meanwhile; that pages are small costs them less than a tenth.
_BUSY_SHARE, _IDLE_SHARE = 1 / 50, 1


def advise_huge_pages(mapping: mmap.mmap, start: int = 0, num_bytes: int | None = None) -> None:
    """Ask for huge pages in a range of an anonymous mapping, before it is touched.

    Only ever a matter of speed: where the kernel refuses, nothing happens.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE, start, len(mapping) if num_bytes is None else num_bytes)


class HugePages:
    """Gives memory in huge pages, at once or, where they come slowly, later."""

    def __init__(
        self,
        clock_s: Callable[[], float] = time.perf_counter,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock_s = clock_s
        self._sleep_s = sleep_s
        self._num_slow_touches = 0
        # Mappings, as long as their tensors keep them, with start and end of what is for later.
        self._later: collections.deque[tuple[weakref.ref[mmap.mmap], int, int]] = (
            collections.deque()
        )

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Zeros, uint8 [num_bytes], on the CPU: in huge pages where they pay and there are any.

        Aligned to 64 bytes at least.
        """
        huge_bytes = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        whole_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if whole_bytes - num_bytes <= num_bytes * _MAX_WASTED_SHARE:
            huge_bytes = whole_bytes
        if huge_bytes == 0:
            return torch.zeros(num_bytes, dtype=torch.uint8)
        size = max(huge_bytes, num_bytes) + HUGE_PAGE_BYTES
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_PAGE_BYTES
        self._ask(mapping, start, huge_bytes)
        # The tensor keeps the mapping.
        return torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=start)

    def collapse_in_background(self, is_busy: Callable[[], bool], cpus: Sequence[int] = ()) -> None:
        """Make huge what is still to be, in a thread of its own.

        Args:
            is_busy: Whether anybody waits for anything else; then it takes fifty times as long.
            cpus: Where the thread runs; () = where the caller does.
        """
        if self._later:
            threading.Thread(
                target=self._collapse_slowly,
                args=(is_busy, cpus),
                name="corun-huge-pages",
                daemon=True,
            ).start()

    def collapse_now(self) -> None:
        """Make huge what is still to be: for who measures what comes next."""
        for _ in self.collapse():
            pass

    def collapse(self) -> Iterator[None]:
        """Make one page huge at each step, until the kernel has no more."""
        while True:
            try:
                reference, start, end = self._later.popleft()
            except IndexError:
                return
            for page in range(start, end, HUGE_PAGE_BYTES):
                mapping = reference()
                if mapping is None:
                    break
                advise_huge_pages(mapping, page, HUGE_PAGE_BYTES)
                error = _advise(mapping, page, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
                del mapping
                if error not in (0, errno.EAGAIN):  # that is about this page only
                    _LOG.info("no more memory is made huge pages of: %s", os.strerror(error))
                    self._later.clear()
                    return
                yield

    def _ask(self, mapping: mmap.mmap, start: int, num_bytes: int) -> None:
        advise_huge_pages(mapping, start, num_bytes)
        if self._num_slow_touches < _MAX_SLOW_TOUCHES:
            began_s = self._clock_s()
            mapping[start] = 0
            is_slow = self._clock_s() - began_s > _SLOW_TOUCH_S
            self._num_slow_touches = self._num_slow_touches + 1 if is_slow else 0
            return
        if _advise(mapping, 0, 0, _MADV_COLLAPSE) == 0:  # the kernel knows it
            _advise(mapping, start, num_bytes, mmap.MADV_NOHUGEPAGE)
            self._later.append((weakref.ref(mapping), start, start + num_bytes))

    def _collapse_slowly(self, is_busy: Callable[[], bool], cpus: Sequence[int]) -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)
        num_pages = 0
        began_s = last_s = self._clock_s()
        for _ in self.collapse():
            num_pages += 1
            share = _BUSY_SHARE if is_busy() else _IDLE_SHARE
            self._sleep_s((self._clock_s() - last_s) * (1 / share - 1))
            last_s = self._clock_s()
        _LOG.info(
            "made %d MiB of huge pages in the background in %.1f s",
            num_pages * HUGE_PAGE_BYTES >> 20, self._clock_s() - began_s,
        )  # fmt: skip


def _advise(mapping: mmap.mmap, start: int, num_bytes: int, advice: int) -> int:
    return madvise(ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + start, num_bytes, advice)


OF_THIS_PROCESS = HugePages()
zeros = OF_THIS_PROCESS.zeros
