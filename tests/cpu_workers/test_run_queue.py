"""The kernel's statistics of threads, where available."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from corun.cpu_workers import run_queue
from corun.cpu_workers.run_queue import RunQueue, all_thread_ids

needs_statistics = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the kernel keeps no such statistics"
)


@pytest.fixture
def queue() -> Iterator[RunQueue]:
    queue = RunQueue([threading.get_native_id()])
    yield queue
    queue.close()


@needs_statistics
def test_a_thread_that_computes_has_run(queue: RunQueue) -> None:
    before = queue.read()
    end_s = time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass
    after = queue.read()
    assert before is not None and after is not None
    assert after[0][0] - before[0][0] >= 0.04
    assert after[0][1] >= before[0][1]


@needs_statistics
def test_a_thread_that_has_ended_keeps_its_times() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    assert thread.native_id is not None
    queue = RunQueue([thread.native_id, thread.native_id])
    before = queue.read()
    is_over.set()
    thread.join()
    while thread.native_id in all_thread_ids():  # the system takes its time
        time.sleep(0.001)
    after = queue.read()
    assert before is not None and after is not None
    assert len(before) == len(after) == 1
    assert after[0][0] > 0
    again = RunQueue([thread.native_id])
    assert again.read() == []
    for each in (queue, again):
        each.close()
        each.close()


def test_a_kernel_without_statistics_is_told_from_one_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    this = str(os.getpid())
    (tmp_path / this).mkdir()
    monkeypatch.setattr(run_queue, "_TASKS", tmp_path)
    assert RunQueue([os.getpid()]).read() is None
    (tmp_path / this / "schedstat").write_text("what is this")
    assert RunQueue([os.getpid()]).read() is None
    (tmp_path / this / "schedstat").write_text("2000000000 500000000 7\n")
    assert RunQueue([os.getpid()]).read() == [(2.0, 0.5)]
