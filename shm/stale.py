"""Names of POSIX shared memory with their owner, and removal of those with a dead owner.

A name exists only between two calls, so this finds one only after a kill in between.
"""

import contextlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path("/dev/shm")

_log = logging.getLogger(__name__)
_NAME = re.compile(r"corun-(\d+)-(\d+)-(\d+)-\d+")


@dataclass(frozen=True, slots=True)
class Process:
    """A process, distinguished from later ones with the same id."""

    pid: int
    start_ticks: int  # since boot, in clock ticks

    def is_alive(self) -> bool:
        """Whether it is running; False if it has ended, even if it is not reaped."""
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may itself contain spaces and parentheses.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def this_process() -> Process:
    """The calling process."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    return Process(os.getpid(), ticks)


def own_name(number: int) -> str:
    """The name of this process's shared memory number ``number``."""
    owner = this_process()
    return f"/corun-{os.getuid()}-{owner.pid}-{owner.start_ticks}-{number}"


def remove_stale_names(directory: Path = DIRECTORY) -> list[str]:
    """Remove names of this user's dead processes; returns them.

    Other users' names and those of live processes stay. If users of the directory do not share
    process ids, a live owner looks dead. That does no harm, because an owner opens its name once,
    removes it itself, and never opens it again.
    """
    removed = []
    try:
        entries = sorted(os.listdir(directory))
    except OSError:
        return []
    for entry in entries:
        match = _NAME.fullmatch(entry)
        if match is None:
            continue
        uid, pid, ticks = (int(group) for group in match.groups())
        if uid != os.getuid() or Process(pid, ticks).is_alive():
            continue
        # It may be gone, or belong to another user in spite of its name.
        with contextlib.suppress(OSError):
            (directory / entry).unlink()
            removed.append(entry)
    if removed:
        _log.info("removed shared memory of dead processes: %s", ", ".join(removed))
    return removed
