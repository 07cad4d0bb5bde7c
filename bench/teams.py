"""How long does a team of two workers take for a job, and what is the least that it could take?

Two workers on two cores compute jobs that follow each other, with all x there and the engine
asleep, over matrices in the arena that no cache holds. The least time is that of a job without
arithmetic (publication, and the members' wait for each other) and the larger of two: bytes of A and
B at the bandwidth of both cores, operations at their rate. Beside it: one worker alone, and two that
do not wait for each other. These cut tokens, or targets or columns, wherever the larger part is
smallest, and each shrinks all ranks of its targets; the gain of waiting is over the better cut. Each
time is the shortest of several rounds, in turn.

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

import numba
import numpy as np
from corun.cpu_workers.deltas.base import ITEM_BYTES
from corun.cpu_workers.deltas.table import DeltaShape, DeltaTable, DeltaTime
from corun.cpu_workers.kernels.lora.delta import store_delta, wide_bytes
from corun.cpu_workers.kernels.lora.regions import TargetShape, plan_packed
from corun.cpu_workers.kernels.simd.arithmetic import bfloat16_tag
from corun.cpu_workers.kernels.simd.layout import COLUMNS_PER_GROUP, RANKS_PER_TILE, padded_features
from corun.cpu_workers.pool import PoolConfig, WorkerPool
from corun.cpu_workers.teams import TeamJob, padded
from corun.shm.arena import HostArena
from corun.shm.atomics import store_release
from corun.shm.region import Region, write_header
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


SimplePart = tuple[tuple[int, int], tuple[int, int]]  # tiles, groups


def _simple(region: Region) -> tuple[SimplePart, SimplePart]:
    """Two parts of targets and columns. Each shrinks all ranks of its targets."""

    def part(first: int, end: int) -> tuple[int, SimplePart]:
        """Values of A and B that are read, and the part."""
        values = group = tile = 0
        tiles = []
        for target in region.targets:
            groups, rank = target.padded_columns // COLUMNS_PER_GROUP, padded(target.rank)
            own = min(end, group + groups) - max(first, group)
            if own > 0:
                tiles += [tile, tile + rank // RANKS_PER_TILE]
                values += rank * (region.in_features + own * COLUMNS_PER_GROUP)
            group, tile = group + groups, tile + rank // RANKS_PER_TILE
        return values, ((min(tiles), max(tiles)), (first, end))

    groups = region.y_columns // COLUMNS_PER_GROUP
    cuts = [(part(0, cut), part(cut, groups)) for cut in range(4, groups, 4)]
    first, second = min(cuts, key=lambda pair: max(pair[0][0], pair[1][0]))
    return first[1], second[1]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _compute(
    tag: Any,
    places: tuple[int, int, int],
    num_jobs: int,
    num_targets: int,
    width: int,
    y_columns: int,
    rows: tuple[int, int, int, int, int],
    part: SimplePart,
) -> None:
    """Compute a part of jobs, each of another region, in both halves."""
    address, region_bytes, num_regions = places
    num_tokens, x, y, h, wide = rows
    tiles, groups = part
    for number in range(num_jobs):
        region = address + number % num_regions * region_bytes
        for cut in ((tiles[0], tiles[1], 0, 0), (0, 0, groups[0], groups[1])):
            store_delta(
                tag,
                region,
                num_targets,
                width * ITEM_BYTES // 8,
                x,
                width * ITEM_BYTES,
                num_tokens,
                y,
                y_columns * ITEM_BYTES,
                h,
                wide,
                cut[0],
                cut[1],
                cut[2],
                cut[3],
            )


class Team:
    """A pool of two workers, and one region after the other for its jobs."""

    def __init__(self, jobs: Jobs, region: Region, cpus: tuple[int, ...]) -> None:
        self._region, self._jobs = region, jobs
        self._num_regions = max(2, jobs.walk_bytes // region.num_bytes)
        self._arena = HostArena.create(self._num_regions * region.num_bytes, is_elastic=False).segment
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
        """The arithmetic alone of members that do not wait for each other."""
        barrier = threading.Barrier(len(cpus))
        begun_s: list[float] = []
        ended_s: list[float] = []
        region, jobs = self._region, self._jobs
        width = padded_features(region.in_features, 0, ITEM_BYTES)[0]
        x = np.full((num_tokens, width), 0x3F80, np.uint16)

        def work(part: SimplePart, cpu: int) -> None:
            os.sched_setaffinity(threading.get_native_id(), {cpu})
            y = np.zeros((num_tokens, region.y_columns), np.uint16)
            h = np.zeros((num_tokens, region.padded_ranks), np.float32)
            wide = np.zeros(wide_bytes(width), np.uint8)
            places = self.address, region.num_bytes, self._num_regions
            rows = num_tokens, *(int(one.ctypes.data) for one in (x, y, h, wide))
            for timed in (False, True):
                if timed:
                    barrier.wait()
                    begun_s.append(time.perf_counter())
                num_jobs = jobs.jobs if timed else 1
                _compute(
                    bfloat16_tag(), places, num_jobs, len(region.targets), width, region.y_columns, rows, part
                )
            ended_s.append(time.perf_counter())

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(_simple(region), cpus, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # By the clocks of the threads: this one gets a core only when one of them has ended.
        return (max(ended_s) - min(begun_s)) / self._jobs.jobs * 1e6

    def close(self) -> None:
        """End the workers, then the memory."""
        self.pool.close()
        self._arena.close()


def _empty_us(jobs: Jobs, cpus: tuple[int, ...]) -> tuple[float, float]:
    """A job with next to no arithmetic of all members: if they wait for each other, and if not."""
    team = Team(jobs, plan_packed(32, ITEM_BYTES, [TargetShape(1, 16, 1.0)]), cpus)
    both = tuple(range(len(cpus)))
    waiting_us, apart_us = (
        min(team.job_us(both, parts, 8 * parts) for _ in range(2 * jobs.rounds)) for parts in (1, len(cpus))
    )
    team.close()
    return waiting_us, apart_us


def _cell(
    team: Team, region: Region, tokens: int, rounds: int, cpus: tuple[int, ...], meter: FloorMeter
) -> dict[str, Any]:
    both = tuple(range(len(cpus)))
    times: dict[str, list[float]] = {"alone": [], "shared": [], "tokens": [], "apart": []}
    for _ in range(rounds):
        meter.measure()
        times["alone"].append(team.job_us((0,), 1, tokens))
        times["shared"].append(team.job_us(both, 1, tokens))
        if tokens >= 16:
            times["tokens"].append(team.job_us(both, len(both), tokens))
        times["apart"].append(team.simple_us(cpus, tokens))
    least = floor_of(region, tokens, meter.floors)
    found = {name: round(min(values), 1) for name, values in times.items() if values}
    return found | {"memory": least.memory_us, "arithmetic": least.arithmetic_us}


def _cells(
    jobs: Jobs, cpus: tuple[int, ...], empty_us: float, apart_us: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    meter = FloorMeter(len(cpus))
    for in_features, columns in jobs.groups:
        for rank in jobs.ranks:
            region = plan_packed(in_features, ITEM_BYTES, [TargetShape(rank, n, 1.0) for n in columns])
            team = Team(jobs, region, cpus)
            for tokens in jobs.tokens:
                cell = _cell(team, region, tokens, jobs.rounds, cpus, meter)
                least_us = empty_us + max(cell["memory"], cell["arithmetic"])
                best_us = min(cell["shared"], cell.get("tokens", cell["shared"]))
                simple_us = min(apart_us + cell["apart"], cell.get("tokens", float("inf")))
                cell |= {
                    "over_least": round(best_us / least_us, 3),
                    "gain_of_wait": round(simple_us / cell["shared"], 3),
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
    empty_us, apart_us = _empty_us(jobs, cpus)
    print(f"a job without arithmetic: {empty_us:.1f} us, without waiting {apart_us:.1f} us", flush=True)
    figures: dict[str, Any] = {"empty_us": round(empty_us, 1), "apart_us": round(apart_us, 1)}
    for name, cell in _cells(jobs, cpus, empty_us, apart_us):
        figures[name] = cell
        print(f"{name}: {cell}", flush=True)
    cells = [cell for cell in figures.values() if isinstance(cell, dict)]
    bound = [cell for cell in cells if cell["num_bytes"] >= _MIN_BYTES]
    for name in ("over_least", "gain_of_wait"):
        values = [cell[name] for cell in bound]
        print(f"{name}: median {statistics.median(values)}, {min(values)} to {max(values)}")
    bounds: dict[str, bool | None] = {
        "at_most_1.3_of_the_least": all(cell["over_least"] <= MAX_OVER_LEAST for cell in bound),
        "waiting_gains_1.15_somewhere": max(c["gain_of_wait"] for c in cells) >= MIN_GAIN_OF_WAIT,
    }
    report("teams", asdict(jobs), figures, bounds)


if __name__ == "__main__":
    main()
