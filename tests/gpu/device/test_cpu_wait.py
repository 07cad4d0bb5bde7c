"""Waits on words by threads: they end in every stage, time out, and cost little."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from corun.gpu.device.cpu_wait import copy_until, wait_awake, wait_briefly, wait_clock, wait_word
from corun.shm.atomics import store_release

LONG_NS = 30_000_000_000


@pytest.fixture
def address() -> Iterator[int]:
    word = np.zeros(1, np.int32)
    yield int(word.ctypes.data)
    del word  # it is not read any more


@pytest.mark.parametrize("waited_ns", [0, 1_000_000, 50_000_000])
def test_a_wait_notices_while_it_spins_yields_and_sleeps(address: int, waited_ns: int) -> None:
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(wait_word(address, 3, waited_ns, LONG_NS)))
    waiter.start()
    store_release(address, 2)
    store_release(address, 3)
    waiter.join(30)
    assert seen == [True]


def test_what_is_reached_is_noticed_at_once_and_cyclically(address: int) -> None:
    assert wait_word(address, 0, 0, 0)
    store_release(address, -(2**31))
    assert wait_word(address, 2**31 - 1, 0, 0)
    assert not wait_word(address, -(2**31) + 1, 0, 0)


def test_every_wait_gives_up(address: int) -> None:
    assert not wait_word(address, 1, 0, 1_000_000)
    assert not wait_word(address, 1, 99_000_000, 100_000_000)
    assert not wait_briefly(address, 1)
    assert not wait_awake(address, 1)


def test_a_long_wait_sleeps(address: int) -> None:
    before_s = time.thread_time()
    assert not wait_word(address, 1, 0, 300_000_000)
    assert time.thread_time() - before_s < 0.15


def test_a_wait_takes_no_stack_per_look(address: int) -> None:
    """Stack used inside the loop would end the process after some thousand polls."""
    stack_bytes = threading.stack_size(128 * 1024)
    try:
        waiter = threading.Thread(target=lambda: [wait_awake(address, 1) for _ in range(10)])
        waiter.start()
        waiter.join(30)
        assert not waiter.is_alive()
    finally:
        threading.stack_size(stack_bytes)


def test_a_deadline_is_not_missed_early() -> None:
    for duration_ns in (-5, 0, 20_000, 2_000_000):
        deadline_ns = time.monotonic_ns() + duration_ns
        wait_clock(deadline_ns)
        assert time.monotonic_ns() >= deadline_ns


@pytest.mark.parametrize("num_bytes", [0, 1, 1_000_003])
def test_a_copy_lasts_until_its_deadline(num_bytes: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    target = np.zeros(num_bytes + 2, np.uint8)
    deadline_ns = time.monotonic_ns() + 2_000_000
    copy_until(target.ctypes.data + 1, source.ctypes.data, num_bytes, deadline_ns)
    assert time.monotonic_ns() >= deadline_ns
    assert np.array_equal(target[1:-1], source) and target[0] == target[-1] == 0
