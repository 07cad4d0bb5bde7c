"""A pool of real CPU workers with jobs of known results, driven as by an engine."""

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import psutil
from corun.cpu_workers.deltas.table import DeltaShape, DeltaTable, DeltaTime
from corun.cpu_workers.pool import PoolConfig, WorkerPool
from corun.cpu_workers.teams import TeamJob
from corun.shm.atomics import store_release
from corun.shm.job import Job, JobStatus
from corun.shm.mailbox import SupervisorEnd
from corun.shm.segment import Segment
from support.deltas import DeltaCase, Workplace
from support.processes import is_alive, running_below

READY_TIMEOUT_S = 100.0  # numba may have to compile, on a loaded machine
WAIT_TIMEOUT_S = 60.0
IN_FEATURES = 64
OUT_FEATURES = (48, 16)
MAX_TOKENS = 32
NUM_PLACES = 16  # jobs with rows of their own
_ALIGNMENT = 64


def table_of(backend: str) -> DeltaTable:
    """A table that chooses ``backend`` for everything, so that none has to be measured."""
    return DeltaTable((DeltaTime(backend, DeltaShape(1, 8, 1024), 10.0),))


def case(num_tokens: int = 8, ranks: Sequence[int] = (8, 4), seed: int = 0) -> DeltaCase:
    """An input group that fits the pools of ``make_config``."""
    return DeltaCase(num_tokens, IN_FEATURES, OUT_FEATURES, tuple(ranks), seed=seed)


def last_cpus(num_workers: int) -> tuple[int, ...]:
    """CPUs for workers; where there are too few, some serve several."""
    cpus = sorted(os.sched_getaffinity(0), reverse=True)
    return tuple(cpus[worker % len(cpus)] for worker in range(num_workers))


def make_config(num_workers: int = 1, **values: Any) -> PoolConfig:
    """A small pool; ``values`` replace the defaults of its configuration."""
    defaults: dict[str, Any] = {
        "worker_cpus": last_cpus(num_workers),
        "max_tokens": NUM_PLACES * MAX_TOKENS,
        "max_in_features": IN_FEATURES,
        "max_out_columns": sum(OUT_FEATURES),
        "max_padded_ranks": 256,
        "num_job_slots": NUM_PLACES,
        "delta_table": table_of("numpy"),
    }
    return PoolConfig(**(defaults | values))


class Driver:
    """A pool with an arena of some adapters, and the engine's part of a job."""

    def __init__(self, cases: Sequence[DeltaCase], config: PoolConfig | None = None) -> None:
        """Start, and wait until all workers are ready."""
        self.places = [Workplace(given) for given in cases]
        sizes = [place.region.num_bytes for place in self.places]
        self.offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        assert all(offset % _ALIGNMENT == 0 for offset in self.offsets)
        self.arena = Segment.create(sum(sizes), kind="adapters")
        for place, offset, size in zip(self.places, self.offsets, sizes, strict=True):
            self.arena.buffer[offset : offset + size] = place.region_bytes()
        self.pool = WorkerPool(config or make_config(), self.arena)
        self._num_published = 0
        try:
            self.pool.wait_ready(READY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def publish(
        self, members: int | tuple[int, ...], index: int, predicted_us: int = 100, token_parts: int = 1
    ) -> Job:
        """Submit all tokens of a place to a worker or a team; its x is not there yet."""
        task = TeamJob(
            arena_offset=self.offsets[index],
            first_token=self._num_published % NUM_PLACES * MAX_TOKENS,
            num_tokens=self.places[index].case.num_tokens,
            members=(members,) if isinstance(members, int) else members,
            token_parts=token_parts,
            predicted_us=predicted_us,
        )
        (job,) = self.pool.submit([task])
        self._num_published += 1
        return job

    def send_x(self, index: int, job: Job) -> None:
        """What the accelerator does: copy x, then signal."""
        place = self.places[index]
        rows = self.pool.rows.rows(job.x_offset, job.num_tokens, place.case.in_features)
        rows[:] = place.x
        self.pool.rows.rows(job.y_offset, job.num_tokens, place.region.y_columns)[:] = 0x7FC1
        store_release(self.pool.end.ready_address, job.sequence)

    def start(
        self, members: int | tuple[int, ...], index: int, predicted_us: int = 100, token_parts: int = 1
    ) -> Job:
        """Publish a job and send its x."""
        job = self.publish(members, index, predicted_us, token_parts)
        self.send_x(index, job)
        return job

    def finish(self, index: int, job: Job) -> JobStatus:
        """Wait for a job, take its result, and check y if there is one."""
        self.pool.wait_done(job.sequence, timeout_s=WAIT_TIMEOUT_S)
        result = self.pool.end.take_result()
        assert result.sequence == job.sequence
        if result.status == JobStatus.DONE:
            place = self.places[index]
            place.y[:] = self.pool.rows.rows(job.y_offset, job.num_tokens, place.region.y_columns)
            place.check(hidden_roundings=1)
        return JobStatus(result.status)

    def run(
        self, members: int | tuple[int, ...], index: int, predicted_us: int = 100, token_parts: int = 1
    ) -> JobStatus:
        """One job from start to end."""
        return self.finish(index, self.start(members, index, predicted_us, token_parts))

    def wait_ready(self) -> None:
        self.pool.wait_ready(READY_TIMEOUT_S)

    def close(self) -> None:
        """End the pool; the segments must be free."""
        self.pool.close()
        self.arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # views in the frames of the error keep segments open
            self.pool.__exit__(kind, error, traceback)
            self.arena.__exit__(kind, error, traceback)


def wait_until(is_true: Callable[[], bool], timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Look until it is true, with a deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.002)


def has_begun(driver: Driver, worker: int, job: Job) -> bool:
    """Whether the worker computes this job right now."""
    current = SupervisorEnd(driver.pool.control.mailbox(worker)).activity().job
    return current is not None and current.sequence == job.sequence


def supervisor() -> psutil.Process:
    """The supervisor that this process has started."""
    (found,) = running_below("corun.cpu_workers.supervisor")
    return found


def workers() -> list[psutil.Process]:
    """Its workers, in their order."""
    found = running_below("corun.cpu_workers.worker", supervisor().pid)
    return sorted(found, key=lambda process: process.pid)


def are_gone(pids: Sequence[int]) -> bool:
    """Whether no process of these is left; one that waits to be reaped is none."""
    return not any(is_alive(pid) for pid in pids)
