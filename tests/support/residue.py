"""What this process holds that an engine must give back."""

import gc
import os
import threading
from pathlib import Path

import psutil


def named_segments(*pids: int) -> list[str]:
    """Shared memory that has a name, of these processes; others may be making some right now."""
    found = [name for name in os.listdir("/dev/shm") if name.startswith("corun-")]
    return sorted(name for name in found if any(f"-{pid}-" in name for pid in pids))


def held() -> tuple[int, list[str], list[str], int]:
    """Open descriptors, shared memory by name, threads of corun, mappings of shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return (
        len(os.listdir("/proc/self/fd")),
        named_segments(os.getpid()),
        [thread.name for thread in threading.enumerate() if thread.name.startswith("corun")],
        sum("corun-" in line and "(deleted)" in line for line in maps.splitlines()),
    )


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Files below /dev/shm that these processes have open or mapped."""
    found = set()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        names = [line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/dev/shm/" in line]
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            if descriptor.is_symlink():
                names.append(os.readlink(descriptor))
        found |= {Path(name) for name in names if name.startswith("/dev/shm/")}
    return found


def assert_nothing_left(processes: list[psutil.Process], shared_memory: set[Path]) -> None:
    """Processes end in time, and nothing of their shared memory has a name."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
    assert not [path for path in shared_memory if path.exists()]
    assert not named_segments(*(process.pid for process in processes))
