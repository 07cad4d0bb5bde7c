"""Start and end of corun's processes, and the kernel's facts about a process.

Used by the engine, its workers and the command line. Loads only the standard library.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from .watch import ProcessStat

_PR_SET_PDEATHSIG = 1
_END_SIGNALS = frozenset((signal.SIGINT, signal.SIGTERM))


class OrphanError(Exception):
    """The parent died before this process could bind itself to it."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Block SIGINT and SIGTERM in processes that are started inside.

    A process unblocks them once it has installed its handlers: an interpreter that is still
    importing would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore SIGINT, which also reaches the parent, and unblock signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends.

    Raises ``OrphanError`` if the parent, ``parent_pid``, is already gone, ``OSError`` if the
    kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise OrphanError(f"process {parent_pid}, which started this one, has ended")


def own_child_process(parent_pid: int) -> None:
    """Set what only the owner of a process may set: its end, its signals, its crash reports.

    The parent decides when it ends: an interrupt reaches all processes of a terminal.

    Raises:
        OrphanError: The parent is gone.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignore_interrupts()
    faulthandler.enable()


def exit_process(status: int) -> NoReturn:
    """End the process without finalising the interpreter.

    The last garbage collection takes a tenth of a second with numpy, and more than one second with
    torch and transformers, and the system frees the memory anyway.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(status)


def bound_socket(prog: str, arguments: Sequence[str] | None) -> socket.socket | None:
    """Start a process of the pool: bind it to its parent; return its inherited socket.

    None if the parent has already ended.
    """
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        own_child_process(options.parent_pid)
    except OrphanError:
        return None
    os.set_inheritable(options.fd, False)
    return socket.socket(fileno=options.fd)


def process_stat(pid: int) -> ProcessStat:
    """Return the kernel's statistics of a process's main thread; an ended one is not runnable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        # The name, in parentheses, may contain any characters.
        fields = stat.rpartition(")")[2].split()
        return ProcessStat(fields[0] == "R", _cpu_ns(pid, fields))
    except (FileNotFoundError, ProcessLookupError):
        return ProcessStat(is_runnable=False, cpu_ns=0)


def _cpu_ns(pid: int, stat_fields: list[str]) -> int:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0])
    except (FileNotFoundError, IndexError):  # without these statistics the kernel counts in ticks
        ticks = int(stat_fields[11]) + int(stat_fields[12])
        return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def kill_and_wait(pidfds: Sequence[int], timeout_s: float) -> bool:
    """Kill the processes and wait until all have ended; False on time-out."""
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    deadline_s = time.monotonic() + timeout_s
    return all(has_ended(pidfd, deadline_s - time.monotonic()) for pidfd in pidfds)


def has_ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Whether the process ends in time; it may not have been reaped yet."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
