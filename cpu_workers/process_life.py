"""How helper processes are bound to their parents, and what the kernel tells of a process."""

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from .watch import Look

_PR_SET_PDEATHSIG = 1


class OrphanError(Exception):
    """The parent died before this process could bind itself to it."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Raises ``OrphanError`` if the parent, ``parent_pid``, is already gone, ``OSError`` if the
    kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise OrphanError(f"process {parent_pid}, which started this one, has ended")


def end_quickly() -> None:
    """Have this process leave its memory to the system, instead of looking at all of it at its end.

    The interpreter's last garbage collection takes a tenth of a second with numpy, and more than
    one second with the libraries of models.
    """
    atexit.register(gc.freeze)


def ignore_group_signals() -> None:
    """Leave it to the parent when to end: an interrupt reaches all processes of a terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def bound_socket(prog: str, arguments: Sequence[str] | None) -> socket.socket | None:
    """Begin a helper process: bind it to its parent; return the socket that it was given.

    None if the parent has ended already.
    """
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        die_with_parent(options.parent_pid)
    except OrphanError:
        return None
    end_quickly()
    ignore_group_signals()
    faulthandler.enable()
    os.set_inheritable(options.fd, False)
    return socket.socket(fileno=options.fd)


def look_at(pid: int) -> Look:
    """Return what the kernel says of a process's main thread; a process gone is not runnable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        # The name, in parentheses, may hold anything.
        fields = stat.rpartition(")")[2].split()
        return Look(fields[0] == "R", _cpu_ns(pid, fields))
    except (FileNotFoundError, ProcessLookupError):
        return Look(is_runnable=False, cpu_ns=0)


def _cpu_ns(pid: int, stat_fields: list[str]) -> int:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0])
    except (FileNotFoundError, IndexError):  # a kernel built without it counts in ticks
        ticks = int(stat_fields[11]) + int(stat_fields[12])
        return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def kill_and_wait(pidfds: Sequence[int], timeout_s: float) -> bool:
    """Kill the processes and wait until all have ended; False if they have not in time."""
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    deadline_s = time.monotonic() + timeout_s
    return all(has_ended(pidfd, deadline_s - time.monotonic()) for pidfd in pidfds)


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Whether the process has ended, or does so in time. Somebody may still have to reap it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
