"""Processes bound to their parents, and what the kernel says of processes; all of them real."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from corun.cpu_workers.process_life import has_ended, kill_and_wait, process_stat

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
SPIN = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


def start(command: list[str], started: list[subprocess.Popen[bytes]]) -> int:
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    started.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


def test_looks_tell_running_sleeping_and_stopped(started: list[subprocess.Popen[bytes]]) -> None:
    spinning, sleeping = start(SPIN, started), start(SLEEP, started)
    before = process_stat(spinning)
    assert before.is_runnable
    deadline_s = time.monotonic() + 20
    while process_stat(spinning).cpu_ns == before.cpu_ns:
        assert time.monotonic() < deadline_s
    while process_stat(sleeping).is_runnable:  # it has still to fall asleep
        assert time.monotonic() < deadline_s
    os.kill(spinning, signal.SIGSTOP)
    while process_stat(spinning).is_runnable:
        assert time.monotonic() < deadline_s
    assert not process_stat(2**22 + 1).is_runnable  # no such process


def test_a_stopped_process_can_be_killed(started: list[subprocess.Popen[bytes]]) -> None:
    pid = start(SLEEP, started)
    pidfd = os.pidfd_open(pid)
    assert not has_ended(pidfd)
    os.kill(pid, signal.SIGSTOP)
    assert kill_and_wait([pidfd], timeout_s=10)
    assert has_ended(pidfd)
    assert kill_and_wait([pidfd], timeout_s=0)
    os.close(pidfd)


def test_a_process_dies_with_its_parent() -> None:
    child = (
        "import os, time\n"
        "from corun.cpu_workers.process_life import die_with_parent\n"
        "die_with_parent(int(os.environ['PARENT']))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "os.environ['PARENT'] = str(os.getpid())\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    pidfd = os.pidfd_open(pid)
    process.kill()
    assert has_ended(pidfd, timeout_s=10)
    os.close(pidfd)
    process.communicate(timeout=10)


def test_an_orphan_says_so() -> None:
    script = (
        "from corun.cpu_workers.process_life import OrphanError, die_with_parent\n"
        "try:\n    die_with_parent(1 << 22)\n"
        "except OrphanError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "process 4194304, which started this one, has ended" in done.stdout, done.stderr
