"""Time that threads of this process have run and have waited for a core, counted by Linux."""

import os
from collections.abc import Iterable
from pathlib import Path

_TASKS = Path("/proc/self/task")
_MAX_BYTES = 128  # for three numbers


class RunQueue:
    """Some threads of this process. ``close`` closes its file descriptors."""

    def __init__(self, thread_ids: Iterable[int]) -> None:
        """``thread_ids``: of the kernel; ended threads are ignored."""
        self._files: list[int] = []
        self._times_ns: list[tuple[int, int]] = []
        self._is_known = (_TASKS / str(os.getpid()) / "schedstat").exists()
        for thread_id in dict.fromkeys(thread_ids):
            try:
                self._files.append(os.open(_TASKS / str(thread_id) / "schedstat", os.O_RDONLY))
            except OSError:  # it has ended, or the kernel has no such statistics
                continue
            self._times_ns.append((0, 0))

    def read(self) -> list[tuple[float, float]] | None:
        """Seconds that each thread ran, and was runnable without a core, since it started.

        A thread that ends keeps its last times. None if the kernel has no such statistics. Takes
        half a microsecond per thread.
        """
        if not self._is_known:
            return None
        for place, file in enumerate(self._files):
            try:
                ran, waited, _ = os.pread(file, _MAX_BYTES, 0).split()
                self._times_ns[place] = int(ran), int(waited)
            except ProcessLookupError:
                continue
            except (OSError, ValueError):
                self._is_known = False
                return None
        return [(ran * 1e-9, waited * 1e-9) for ran, waited in self._times_ns]

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files, self._times_ns = [], []


def all_thread_ids() -> list[int]:
    """Ids of all threads of this process, including those that libraries have started."""
    return sorted(map(int, os.listdir(_TASKS)))
