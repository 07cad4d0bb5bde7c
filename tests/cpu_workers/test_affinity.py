"""Pinning reports the CPUs that the kernel grants. Tested in threads, as these end afterwards."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from corun.cpu_workers.affinity import Pinning, limit_torch_threads, pin_thread, place_thread
from corun.gpu.forward.kernel_threads import num_kernel_threads

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
    assert pinning.error is None  # the kernel reports no error
    assert not pinning.is_exact
    assert f"requested CPU {cpu},{absent + 500}, runs on {cpu}" in pinning.describe()


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


def test_torch_is_limited_in_one_thread_and_our_kernels_are_not() -> None:
    before = torch.get_num_threads(), num_kernel_threads()

    def limit() -> tuple[bool, int, int]:
        kernels = num_kernel_threads()
        return (limit_torch_threads(), torch.get_num_threads(), num_kernel_threads() - kernels)

    with ThreadPoolExecutor(1) as other:
        is_limited, torch_threads, change = other.submit(limit).result()
    assert is_limited == (torch_threads == 1)
    assert change == 0
    assert (torch.get_num_threads(), num_kernel_threads()) == before


# Copies of this size use every thread that torch may use, and cosines every thread that MKL may
# use, whose number torch sets for the calling thread. In its own process, because the number of
# torch's threads is a setting of the process, and its helpers live as long as the process.
_COUNT_HELPERS = """
import os, threading
import torch
from corun.cpu_workers.affinity import place_thread

operations = (
    lambda: torch.empty(1 << 20).copy_(torch.ones(1 << 20, dtype=torch.bfloat16)),
    lambda: torch.ones(1 << 20).cos(),
)
counts = []

def compute_much(is_placed) -> None:
    torch.set_num_threads(4)
    if is_placed:
        place_thread(())
    before = len(os.listdir("/proc/self/task"))
    for operation in operations:
        operation()
        counts.append(len(os.listdir("/proc/self/task")) - before)

for is_placed in (True, False):
    thread = threading.Thread(target=compute_much, args=(is_placed,))
    thread.start()
    thread.join()
print(counts)
"""


def test_a_placed_thread_starts_no_helpers_of_torch() -> None:
    """A thread that is as it is starts three, and keeps them."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_HELPERS], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[0, 0, 3, 3]"


def test_placing_a_thread_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    place_thread(())
    assert "torch" not in sys.modules
    assert not limit_torch_threads()
