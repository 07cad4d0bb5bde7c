"""Waiting: sleepers are woken, wake-ups are not lost, and every wait has an end."""

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import numba
import pytest
from corun.shm import loop, park
from corun.shm.atomics import load_acquire, store_release
from corun.shm.errors import PeerDeadError, WaitTimeoutError
from corun.shm.futex import sleep_on, wake
from corun.shm.park import publish, wait_once, wait_until
from corun.shm.segment import Segment
from corun.shm.words import wrap
from support.processes import DEADLINE_S, finish, line_of, program

_LONG_NS = int(DEADLINE_S * 1e9)
_SLEEPS = 64  # where the flag of the first word's sleeper lies


@pytest.fixture
def address() -> Iterator[int]:
    with Segment.create(4096, kind="test") as segment:
        yield segment.address


def test_a_changed_word_is_not_slept_on(address: int) -> None:
    store_release(address, 4)
    sleep_on(address, 3, _LONG_NS)
    assert wake(address) == 0


def test_a_sleep_ends_in_time(address: int) -> None:
    sleep_on(address, 0, 1_000_000)
    assert not wait_once(address, 1, 1000, 1_000_000, address + _SLEEPS)
    assert not wait_once(address, 1, 1000, 1_000_000, 0)
    assert load_acquire(address + _SLEEPS) == 0


@pytest.mark.parametrize("target", [1, wrap(2**31), wrap(2**32)])
def test_a_sleeper_says_so_and_is_woken(address: int, target: int) -> None:
    store_release(address, wrap(target - 1))
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(wait_once(address, target, 0, _LONG_NS, address + _SLEEPS))
    )
    thread.start()
    wait_until(address + _SLEEPS, 1, timeout_s=DEADLINE_S)
    publish(address, target, address + _SLEEPS)
    thread.join(DEADLINE_S)
    assert found == [True]
    assert load_acquire(address + _SLEEPS) == 0


_ECHO = """
import sys
from corun.shm.park import publish, wait_once
from corun.shm.segment import Segment
segment = Segment.attach(int(sys.argv[1]), kind="test")
base = segment.address
print("ready", flush=True)
for round in range(1, int(sys.argv[2]) + 1):
    while not wait_once(base, round, int(sys.argv[3]), 60_000_000_000, base + 64):
        pass
    publish(base + 128, round, base + 192)
"""


_OPERATIONS = re.compile(r"fence seq_cst|store atomic|load atomic|@syscall")
_LETTERS = {"fence seq_cst": "F", "store atomic": "S", "load atomic": "L", "@syscall": "C"}


@pytest.mark.parametrize(
    ("function", "signature", "expected"),
    [
        (publish, "void(int64, int32, int64)", "FSFLC"),
        (park.park_once, "boolean(int64, int32, int64, int64)", "FSFLC"),
        (loop.await_job, "int32(int64, int64, int32, int64, int64, int64)", "FSFLL"),
    ],
)
def test_a_full_fence_parts_what_is_stored_from_what_is_looked_at(
    function: Any, signature: str, expected: str
) -> None:
    """Failures without it are too rare for a test, and differ by machine."""
    compiled = numba.njit(signature, nogil=True)(function.py_func)
    code = "".join(compiled.inspect_llvm().values())
    body = code[code.index("define") :].partition("\n}")[0]
    operations = "".join(_LETTERS[found] for found in _OPERATIONS.findall(body))
    assert expected in operations


def test_no_wake_up_is_lost_between_processes() -> None:
    """Each sleeps for a minute unless it is woken, so one lost wake-up is too many.

    One spins about as long as a wake-up takes, the other not at all.
    """
    num_rounds, spin_ns = 3000, 3000
    with (
        Segment.create(4096, kind="test") as segment,
        program(_ECHO, segment.fd, num_rounds, spin_ns, pass_fds=[segment.fd]) as echo,
    ):
        base = segment.address
        assert line_of(echo) == "ready"
        for number in range(1, num_rounds + 1):
            publish(base, number, base + 64)
            assert wait_once(base + 128, number, 0, _LONG_NS, base + 192)
        finish(echo)


def test_a_wait_for_a_word_that_nobody_wakes_for(address: int) -> None:
    thread = threading.Thread(target=wait_until, args=(address, 1), kwargs={"timeout_s": 60})
    thread.start()
    time.sleep(0.01)
    store_release(address, 1)  # as an accelerator does
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_wait_says_when_its_time_is_up(address: int) -> None:
    store_release(address, 6)
    with pytest.raises(WaitTimeoutError, match=r"is 6, not 7, after 0\.01 s"):
        wait_until(address, 7, timeout_s=0.01)
    wait_until(address, 6, timeout_s=0)
    wait_until(address, wrap(6 - 2**31 + 1), timeout_s=0)


def test_a_peer_that_is_killed_ends_the_wait_and_hinders_nobody() -> None:
    with Segment.create(4096, kind="test") as segment:
        base = segment.address
        with program(_ECHO, segment.fd, 5, 0, pass_fds=[segment.fd]) as echo:
            assert line_of(echo) == "ready"
            _kill_asleep(base, echo)
        assert load_acquire(base + _SLEEPS) == 1  # its flag stays
        with program(_ECHO, segment.fd, 5, 0, pass_fds=[segment.fd]) as echo:
            assert line_of(echo) == "ready"
            for number in range(1, 6):
                publish(base, number, base + 64)
                assert wait_once(base + 128, number, 0, _LONG_NS, base + 192)
            finish(echo)


def _kill_asleep(base: int, echo: subprocess.Popen[str]) -> None:
    """Kill a peer that sleeps, while we wait for it."""
    wait_until(base + _SLEEPS, 1, timeout_s=DEADLINE_S)
    echo.kill()
    with pytest.raises(PeerDeadError, match="died at 0, before 1"):
        wait_until(
            base + 128,
            1,
            timeout_s=DEADLINE_S,
            sleeps_address=base + 192,
            is_peer_alive=lambda: echo.poll() is None,
        )


def test_what_a_peer_stored_before_it_died_counts(address: int) -> None:
    def dies() -> bool:
        store_release(address, 1)
        return False

    wait_until(address, 1, timeout_s=DEADLINE_S, is_peer_alive=dies)
    assert load_acquire(address) == 1
