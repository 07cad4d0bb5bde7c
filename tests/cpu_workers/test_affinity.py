"""Pinning: what the kernel grants is what is reported. In threads, so that it ends with them."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from corun.cpu_workers.affinity import Pinning, pin_thread

Result = TypeVar("Result")


def in_thread(call: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_thread_is_pinned_alone() -> None:
    before = os.sched_getaffinity(0)
    cpu = max(before)
    pinning = in_thread(lambda: pin_thread([cpu]))
    assert pinning == Pinning((cpu,), (cpu,))
    assert pinning.is_exact
    assert os.sched_getaffinity(0) == before


def test_a_set_that_the_kernel_cuts_is_read_back() -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    absent = os.cpu_count() or 1
    pinning = in_thread(lambda: pin_thread([cpu, absent + 500]))
    assert pinning.granted == (cpu,)
    assert pinning.error is None  # the kernel said nothing
    assert not pinning.is_exact
    assert f"asked for CPU {cpu},{absent + 500}, runs on {cpu}" in pinning.describe()


def test_an_absent_cpu_leaves_the_thread_as_it_was() -> None:
    before = tuple(sorted(os.sched_getaffinity(0)))
    pinning = in_thread(lambda: pin_thread([1000]))
    assert pinning.granted == before
    assert pinning.error is not None
    assert not pinning.is_exact


def test_a_sandbox_that_forbids_pinning_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cpus: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    pinning = pin_thread([0])
    assert pinning.granted == tuple(sorted(os.sched_getaffinity(0)))
    assert "Operation not permitted" in pinning.describe()
