"""What this process holds that an engine must give back."""

import contextlib
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from .processes import DEADLINE_S, is_alive


def named_segments(*pids: int) -> list[str]:
    """Shared memory that has a name, of these processes; others may be making some right now."""
    found = [name for name in os.listdir("/dev/shm") if name.startswith("corun-")]
    return sorted(name for name in found if any(f"-{pid}-" in name for pid in pids))


@dataclass(frozen=True)
class Held:
    """Open descriptors, shared memory by name, threads, mappings of shared memory."""

    descriptors: frozenset[str]
    segments: frozenset[str]
    threads: frozenset[threading.Thread]
    mappings: frozenset[str]

    def since(self, before: "Held") -> list[object]:
        """What was not held before. What earlier tests have left may go at any time."""
        return [
            one
            for now, then in (
                (self.descriptors, before.descriptors),
                (self.segments, before.segments),
                (self.threads, before.threads),
                (self.mappings, before.mappings),
            )
            for one in now - then
        ]


def held() -> Held:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Held(
        open_descriptors(),
        frozenset(named_segments(os.getpid())),
        frozenset(one for one in threading.enumerate() if one.name.startswith("corun")),
        frozenset(line for line in maps if "corun-" in line and "(deleted)" in line),
    )


def open_descriptors() -> frozenset[str]:
    """Descriptors open in this process: number and file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(f"{name}:{os.readlink(f'/proc/self/fd/{name}')}")
    return frozenset(found)


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Files below /dev/shm that these processes have open or mapped."""
    found = set()
    for process in processes:
        if not is_alive(process.pid):  # a short-lived child
            continue
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        names = [line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/dev/shm/" in line]
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is closed meanwhile
                names.append(os.readlink(descriptor))
        found |= {Path(name) for name in names if name.startswith("/dev/shm/")}
    return found


def assert_nothing_left(processes: list[psutil.Process], shared_memory: set[Path]) -> None:
    """Processes end in time, and nothing of their shared memory has a name."""
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive
    assert not [path for path in shared_memory if path.exists()]
    assert not named_segments(*(process.pid for process in processes))
