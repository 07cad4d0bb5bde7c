"""A pool of real workers when nothing goes wrong, and what it refuses."""

import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from corun.cpu_workers.errors import WorkerPoolError
from corun.cpu_workers.pool import WorkerPool
from corun.cpu_workers.watch import Restarts
from corun.shm.errors import ShmError, SpaceError
from corun.shm.job import JobStatus
from corun.shm.segment import Segment
from support.residue import held, named_segments
from support.worker_pool import Driver, are_gone, case, make_config, supervisor, table_of, wait_until, workers

DONE = JobStatus.DONE


# Jobs of numba are those of test_jobs.
@pytest.mark.parametrize("backend", ["numpy", pytest.param("numba", marks=pytest.mark.full)])
def test_jobs_of_several_adapters_on_several_workers(backend: str) -> None:
    cases = [case(1), case(8, (16, 0), 1), case(32, (1, 64), 2), case(13, (3, 5), 3)]
    config = make_config(2, delta_table=table_of(backend))
    with Driver(cases, config) as driver:
        for index in range(len(cases)):
            for worker in (0, 1):
                assert driver.run(worker, index) is DONE
        assert driver.pool.ready_workers() == (0, 1)
        assert driver.pool.counts().num_restarts == 0


def test_nothing_is_left_after_close() -> None:
    before, threads = held(), set(threading.enumerate())
    driver = Driver([case()], make_config(2))
    pids = [supervisor().pid, *(worker.pid for worker in workers())]
    assert len(pids) == 3
    assert driver.run(0, 0) is DONE
    assert not named_segments(os.getpid(), *pids)
    driver.close()
    driver.pool.close()
    assert not driver.pool.is_available
    assert are_gone(pids)
    assert not held().since(before)
    assert set(threading.enumerate()) <= threads


def test_workers_run_where_they_should_with_one_thread_each() -> None:
    """Also when the thread that has started the pool has ended."""
    cpu = max(os.sched_getaffinity(0))
    config = make_config(worker_cpus=(cpu,), supervisor_cpus=(min(os.sched_getaffinity(0)),))
    made: list[Driver] = []
    thread = threading.Thread(target=lambda: made.append(Driver([case()], config)))
    thread.start()
    thread.join()
    with made[0] as driver:
        watcher, (worker,) = supervisor(), workers()
        assert worker.cpu_affinity() == [cpu]
        assert watcher.cpu_affinity() == [min(os.sched_getaffinity(0))]
        assert worker.num_threads() == 1
        environment = worker.environ()
        assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "1"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        maps = Path(f"/proc/{watcher.pid}/maps").read_text()
        assert "libtorch" not in maps and "libcuda" not in maps
        assert driver.run(0, 0) is DONE
        assert (supervisor().pid, workers()[0].pid) == (watcher.pid, worker.pid)


def test_a_pinning_that_the_kernel_refuses_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Driver([case()], make_config(worker_cpus=(5000,))) as driver:
        assert driver.run(0, 0) is DONE
        assert set(workers()[0].cpu_affinity()) == os.sched_getaffinity(0)
    assert "CPU worker 0 is not pinned as configured: requested CPU 5000" in caplog.text


def test_deltas_are_measured_where_no_table_is_given() -> None:
    config = make_config(backend="numpy", delta_table=None, measured_columns=(48, 16))
    with Driver([case()], config) as driver:
        assert driver.run(0, 0) is DONE
        table = driver.pool.delta_table()
        assert table is not None and table.backends == ("numpy",)


def test_too_little_shared_memory_starts_nothing() -> None:
    before = held()
    with Segment.create(4096, kind="adapters") as arena, pytest.raises(SpaceError, match="shared memory"):
        WorkerPool(make_config(max_tokens=2**40), arena)
    assert not held().since(before)


def test_workers_that_cannot_start_say_why() -> None:
    before = held()
    with Segment.create(4096, kind="adapters") as arena:
        pool = WorkerPool(make_config(delta_table=table_of("abacus")), arena)
        with pytest.raises(WorkerPoolError, match="0 of 1 CPU workers are ready after 1 s"):
            pool.wait_ready(1.0)
        wait_until(lambda: "delta back ends are" in pool.trouble)
        assert not pool.is_available
        pool.close()
    with Segment.create(4096, kind="somethingelse") as segment:
        pool = WorkerPool(make_config(), segment)
        wait_until(lambda: "adapters was expected" in pool.trouble)
        pool.close()
    assert not held().since(before)


def test_a_supervisor_that_cannot_start_turns_the_pool_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "_FIRST_DELAY_NS", 1_000_000)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with Segment.create(4096, kind="adapters") as arena:
        pool = WorkerPool(make_config(), arena)
        with pytest.raises(
            WorkerPoolError, match="not available: the supervisor of the CPU workers exited with"
        ):
            pool.wait_ready(60.0)
        assert not pool.is_available
        pool.close()
        monkeypatch.setattr("sys.executable", "/no/such/python")
        pool = WorkerPool(make_config(), arena)
        with pytest.raises(WorkerPoolError, match=r"cannot be started: .*No such file"):
            pool.wait_ready(60.0)
        pool.close()


def test_a_supervisor_that_talks_nonsense_turns_the_pool_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The right processes of another version, say, after an update under a running engine.
    nonsense = tmp_path / "nonsense.py"
    nonsense.write_text(
        "import socket, sys, time\n"
        "fd = int(sys.argv[sys.argv.index('--fd') + 1])\n"
        "socket.socket(fileno=fd).send(b'hello')\n"
        "time.sleep(60)\n"
    )
    python = tmp_path / "python"
    words = shlex.join([sys.executable, str(nonsense)])
    python.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    with Segment.create(4096, kind="adapters") as arena:
        pool = WorkerPool(make_config(), arena)
        with pytest.raises(WorkerPoolError, match="not available: unexpected error: IpcError"):
            pool.wait_ready(60.0)
        pool.close()


def test_views_that_are_held_keep_the_memory_but_not_the_processes() -> None:
    driver = Driver([case()])
    pids = [supervisor().pid, workers()[0].pid]
    held: Any = driver.pool.rows.rows(64, 1, 8)
    with pytest.raises(ShmError, match="cannot be closed while"):
        driver.pool.close()
    assert are_gone(pids)
    del held
    driver.close()
