"""How long does a team of two workers take for a job, and what is the least that it could take?

Two workers on two cores compute jobs that follow each other, with all x there and the engine
asleep, over matrices that no cache holds. The least time is that of a job without arithmetic
(publication, and the members' wait for each other) and the larger of two: bytes of A and B at the
bandwidth of both cores, operations at their rate. Beside it: one worker alone, and two that cut
only columns, so that each shrinks all ranks. Each time is the shortest of several rounds, in turn.

The last line is JSON.

    python bench/teams.py [--rounds 5]
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from corun.cpu_workers.deltas.base import ITEM_BYTES, DeltaJob
from corun.cpu_workers.deltas.numba_backend import NumbaDelta
from corun.cpu_workers.deltas.table import DeltaShape, DeltaTable, DeltaTime
from corun.cpu_workers.kernels.lora.regions import TargetShape, plan_packed
from corun.cpu_workers.pool import PoolConfig, WorkerPool
from corun.cpu_workers.teams import TeamJob, part_of
from corun.shm.atomics import store_release
from corun.shm.region import Region, write_header
from corun.shm.segment import Segment
from delta_floor import floor_of
from floors import FloorMeter
from paired import report

MAX_OVER_LEAST = 1.3
MIN_GAIN_OF_WAIT = 1.15
_MIN_BYTES = 256 << 10  # of A and B, from which the bound holds
_TIMEOUT_S = 60.0
_PLACES = 2  # jobs with rows of their own: a member is at most one job ahead


@dataclass(frozen=True)
class Jobs:
    """Frozen: figures of two runs compare only if these agree."""

    groups: tuple[tuple[int, tuple[int, ...]], ...] = ((4096, (4096, 1024, 1024)), (14336, (4096,)))
    ranks: tuple[int, ...] = (8, 16, 64)
    tokens: tuple[int, ...] = (1, 8, 16, 64)
    walk_bytes: int = 192 << 20  # of matrices, so that each job reads them from memory
    jobs: int = 64  # of a round
    rounds: int = 5


class Team:
    """A pool of two workers, and one region after the other for its jobs."""

    def __init__(self, jobs: Jobs, region: Region, cpus: tuple[int, ...]) -> None:
        self._region, self._jobs = region, jobs
        self._num_regions = max(2, jobs.walk_bytes // region.num_bytes)
        self._arena = Segment.create(self._num_regions * region.num_bytes, kind="adapters")
        rng = np.random.default_rng(0)
        values = self._arena.view(np.uint16, 0, self._arena.num_bytes // 2)
        # Bfloat16 near one: subnormal numbers would be slow.
        values[:] = rng.integers(0x3F00, 0x3F80, values.size, dtype=np.uint16)
        for number in range(self._num_regions):
            write_header(region, self._arena.buffer[number * region.num_bytes :])
        del values
        self.address = self._arena.address
        most = max(jobs.tokens)
        self.pool = WorkerPool(
            PoolConfig(
                worker_cpus=cpus,
                max_tokens=_PLACES * most,
                max_in_features=region.in_features,
                max_out_columns=region.y_columns,
                max_padded_ranks=region.padded_ranks,
                num_job_slots=1 << (jobs.jobs - 1).bit_length(),
                delta_table=DeltaTable((DeltaTime("numba", DeltaShape(1, 8, 1024), 10.0),)),
            ),
            self._arena,
        )
        self.pool.wait_ready(100.0)
        self._next = 0

    def job_us(self, members: tuple[int, ...], token_parts: int, num_tokens: int) -> float:
        """Microseconds of one of many jobs, of which all x is there at once."""
        most = max(self._jobs.tokens)
        tasks = []
        for number in range(self._jobs.jobs):
            offset = self._next % self._num_regions * self._region.num_bytes
            first = number % _PLACES * most
            tasks.append(TeamJob(offset, first, num_tokens, members, token_parts, 10_000))
            self._next += 1
        published = self.pool.submit(tasks)
        start = time.perf_counter()
        store_release(self.pool.end.ready_address, published[-1].sequence)
        self.pool.wait_done(published[-1].sequence, timeout_s=_TIMEOUT_S)
        seconds = time.perf_counter() - start
        if self.pool.end.take_failed():
            raise RuntimeError(f"a job failed: {self.pool.trouble}")
        return seconds / len(tasks) * 1e6

    def simple_us(self, cpus: tuple[int, ...], num_tokens: int) -> float:
        """The same where members only cut the columns: all ranks shrunk by each, no waiting."""
        barrier = threading.Barrier(len(cpus) + 1)
        rows = np.full(num_tokens * (self._region.in_features + self._region.y_columns), 0x3F80, np.uint16)

        def work(member: int, cpu: int) -> None:
            os.sched_setaffinity(threading.get_native_id(), {cpu})
            backend = NumbaDelta()
            y = np.zeros((num_tokens, self._region.y_columns), np.uint16)
            h = np.zeros((num_tokens, self._region.padded_ranks), np.float32)
            tiles = part_of(self._region, num_tokens, 1, 1, 0).tiles
            groups = part_of(self._region, num_tokens, len(cpus), 1, member).groups
            for timed in (False, True):
                if timed:
                    barrier.wait()
                for number in range(self._jobs.jobs if timed else 1):
                    job = DeltaJob(
                        self._region,
                        self.address + number % self._num_regions * self._region.num_bytes,
                        rows.ctypes.data,
                        self._region.in_features * ITEM_BYTES,
                        y.ctypes.data,
                        y.strides[0],
                        num_tokens,
                    )
                    backend.shrink(job, h.ctypes.data, tiles)
                    backend.expand(job, h.ctypes.data, groups)
            barrier.wait()

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(cpus)]
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        barrier.wait()
        seconds = time.perf_counter() - start
        for thread in threads:
            thread.join()
        return seconds / self._jobs.jobs * 1e6

    def close(self) -> None:
        """End the workers, then the memory."""
        self.pool.close()
        self._arena.close()


def _empty_us(jobs: Jobs, cpus: tuple[int, ...]) -> float:
    """A job with next to no arithmetic, shared by all: publication and the members' wait."""
    team = Team(jobs, plan_packed(32, ITEM_BYTES, [TargetShape(1, 16, 1.0)]), cpus)
    times_us = [team.job_us(tuple(range(len(cpus))), 1, 1) for _ in range(2 * jobs.rounds)]
    team.close()
    return min(times_us)


def _cell(
    team: Team, region: Region, tokens: int, rounds: int, cpus: tuple[int, ...], meter: FloorMeter
) -> dict[str, Any]:
    both = tuple(range(len(cpus)))
    times: dict[str, list[float]] = {"alone": [], "shared": [], "tokens": [], "columns": []}
    for _ in range(rounds):
        meter.measure()
        times["alone"].append(team.job_us((0,), 1, tokens))
        times["shared"].append(team.job_us(both, 1, tokens))
        if tokens >= 16:
            times["tokens"].append(team.job_us(both, len(both), tokens))
        times["columns"].append(team.simple_us(cpus, tokens))
    least = floor_of(region, tokens, meter.floors)
    found = {name: round(min(values), 1) for name, values in times.items() if values}
    return found | {"memory": least.memory_us, "arithmetic": least.arithmetic_us}


def _cells(jobs: Jobs, cpus: tuple[int, ...], empty_us: float) -> Iterator[tuple[str, dict[str, Any]]]:
    meter = FloorMeter(len(cpus))
    for in_features, columns in jobs.groups:
        for rank in jobs.ranks:
            region = plan_packed(in_features, ITEM_BYTES, [TargetShape(rank, n, 1.0) for n in columns])
            team = Team(jobs, region, cpus)
            for tokens in jobs.tokens:
                cell = _cell(team, region, tokens, jobs.rounds, cpus, meter)
                least_us = empty_us + max(cell["memory"], cell["arithmetic"])
                best_us = min(cell["shared"], cell.get("tokens", cell["shared"]))
                cell |= {
                    "over_least": round(best_us / least_us, 3),
                    "gain_of_wait": round((empty_us + cell["columns"]) / cell["shared"], 3),
                    "num_bytes": region.num_bytes,
                }
                yield f"in {in_features}, out {sum(columns)}, rank {rank}, {tokens} tokens", cell
            team.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=Jobs.rounds)
    jobs = Jobs(rounds=parser.parse_args().rounds)
    cpus = tuple(sorted(os.sched_getaffinity(0)))[:2]
    if len(cpus) < 2:
        parser.error("this needs two CPUs; allow it more (taskset)")
    empty_us = _empty_us(jobs, cpus)
    print(f"a job without arithmetic: {empty_us:.1f} us", flush=True)
    figures: dict[str, Any] = {"empty_us": round(empty_us, 1)}
    for name, cell in _cells(jobs, cpus, empty_us):
        figures[name] = cell
        print(f"{name}: {cell}", flush=True)
    cells = [cell for cell in figures.values() if isinstance(cell, dict)]
    bound = [cell for cell in cells if cell["num_bytes"] >= _MIN_BYTES]
    print(f"over the least: median {statistics.median(cell['over_least'] for cell in bound)}")
    bounds: dict[str, bool | None] = {
        "at_most_1.3_of_the_least": all(cell["over_least"] <= MAX_OVER_LEAST for cell in bound),
        "waiting_gains_1.15_somewhere": max(c["gain_of_wait"] for c in cells) >= MIN_GAIN_OF_WAIT,
    }
    report("teams", asdict(jobs), figures, bounds)


if __name__ == "__main__":
    main()
