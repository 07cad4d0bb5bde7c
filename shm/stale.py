"""Names of POSIX shared memory that say whose they are, and removal of those whose owner is dead.

A name lives only between two calls, so this finds something only after a kill right there.
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
    """A process and no other one that gets its id later."""

    pid: int
    start_ticks: int  # since boot, in clock ticks

    def is_alive(self) -> bool:
        """Whether it runs, or has ended and waits to be reaped: then it holds nothing, too."""
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or a dead one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may itself hold spaces and parentheses.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def this_process() -> Process:
    """The caller."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    return Process(os.getpid(), ticks)


def own_name(number: int) -> str:
    """The name of this process's shared memory number ``number``."""
    owner = this_process()
    return f"/corun-{os.getuid()}-{owner.pid}-{owner.start_ticks}-{number}"


def remove_stale_names(directory: Path = DIRECTORY) -> list[str]:
    """Remove names of this user's dead processes; returns them.

    Other users' names and those of live processes stay. Where process ids are not shared with
    whoever else uses the directory, a live owner looks dead: that does no harm, because an owner
    opens its name once, removes it itself, and never opens it again.
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
        # It may be gone, or belong to somebody else in spite of its name.
        with contextlib.suppress(OSError):
            (directory / entry).unlink()
            removed.append(entry)
    if removed:
        _log.info("removed shared memory of dead processes: %s", ", ".join(removed))
    return removed
