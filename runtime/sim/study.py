"""Runs many simulations in several processes, stores outcomes and reports progress."""

import gc
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import current_thread, main_thread
from types import TracebackType

import msgspec

from ... import __version__
from ...cpu_workers.process_life import OrphanError, exit_process, own_child_process, signals_held
from ..config.engine import EngineConfig
from ..engine.core import EngineCore
from ..errors import ResourceError
from .cluster import replay_cluster
from .cluster_log import ClusterFigures, ClusterReplayed, ServerLoads
from .cluster_spec import ClusterSpec
from .configure import options_of
from .engine import simulate
from .figures import Figures, counted, figures_of
from .machines import SimulatedMachine
from .replay import Replayed, RequestRecord
from .workload_spec import WorkloadSpec
from .workloads import Workload, draw_workload

_NUM_SAMPLES = 200  # of a run's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The complete input of a run."""

    name: str  # distinguishes it from other runs, for readers
    machine: SimulatedMachine
    config: EngineConfig
    workload: WorkloadSpec
    traces: Path | None
    log_digest: str = ""  # of the workload's file, if that is a log of requests
    horizon_s: float  # after the last arrival
    rank_divisor: int = 1  # of the adapters' ranks
    cluster: ClusterSpec | None = None  # None = one server

    @property
    def num_servers(self) -> int:
        """At least one."""
        return 1 if self.cluster is None else len(self.cluster.servers)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{__version__} {self!r}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The result of one accepted request."""

    rank: int
    ttft_s: float  # to the cut of the run, if it had no first token
    token_s: float  # (end - arrival) / tokens; unfinished: (cut - arrival) / tokens it would have
    parts_s: dict[str, float]  # by values of ``scheduler.events.TimePart``


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The results of a run."""

    figures: Figures
    requests: tuple[RequestOutcome, ...]  # by arrival, without the first ones
    memory: "MemoryLog"
    has_trace: bool  # False: lengths are drawn from a table of quantiles
    num_requests: int  # that arrived
    cluster: "ClusterOutcome | None" = None  # None: there is one server


class ClusterOutcome(msgspec.Struct, frozen=True):
    """The results of many servers."""

    figures: ClusterFigures
    loads: ServerLoads


class MemoryLog(msgspec.Struct):
    """Use of the device's memory over time, at the resolution of a picture."""

    every_s: float
    time_s: list[float] = []
    num_bytes: dict[str, list[int]] = {}  # by kind

    def look(self, now_s: float, core: EngineCore) -> None:
        """Record a sample, unless the last one is recent."""
        if self.time_s and now_s < self.time_s[-1] + self.every_s:
            return
        self.time_s.append(now_s)
        for kind, number in core.stats().memory_bytes["device"].items():
            self.num_bytes.setdefault(kind, []).append(number)


def run(one: SimulatedRun) -> RunOutcome:
    """Simulate. Raises ``ConfigError`` for an unknown trace, policy or rank."""
    workload = draw_workload(one.workload, one.traces)
    one.machine.check_ranks(workload.ranks)
    ranks = tuple(max(1, rank // one.rank_divisor) for rank in workload.ranks)
    workload = replace(workload, ranks=ranks)
    last_s = workload.requests[-1].arrival_s
    memory, cluster = MemoryLog(last_s / _NUM_SAMPLES), None
    replayed: Replayed | ClusterReplayed
    if one.cluster is None:
        replayed = simulate(
            one.machine, workload, options_of(one.config), horizon_s=one.horizon_s, look=memory.look
        )
    else:
        loads = ServerLoads.over(last_s, _NUM_SAMPLES)
        replayed = replay_cluster(
            one.machine,
            workload,
            options_of(one.config),
            replace(one.cluster, seed=one.workload.seed),
            horizon_s=one.horizon_s,
            look=loads.look,
            look_every_s=loads.every_s,
        )
        memory = MemoryLog(loads.every_s, loads.time_s, loads.num_bytes)
        cluster = ClusterOutcome(loads.figures(replayed), loads)
    return RunOutcome(
        figures_of(replayed, workload, one.machine),
        tuple(
            _outcome(record, workload, replayed.duration_s)
            for record in counted(replayed.records, len(workload.requests))
        ),
        memory,
        workload.has_trace,
        len(workload.requests),
        cluster,
    )


def _outcome(record: RequestRecord, workload: Workload, cut_s: float) -> RequestOutcome:
    request = workload.requests[record.request_id - 1]
    first_s = cut_s if record.first_token_s is None else record.first_token_s
    end_s = cut_s if record.end_s is None else record.end_s
    return RequestOutcome(
        workload.ranks[request.adapter],
        first_s - record.arrival_s,
        (end_s - record.arrival_s) / request.output_tokens,
        record.parts_s,
    )


# Called with a run and its outcome: returns another run to start because of it, if any.
Then = Callable[[SimulatedRun, RunOutcome], SimulatedRun | None]


# Python's tracker removes the semaphores of a killed process; its warning is suppressed.
_NO_WORDS = "ignore:resource_tracker:UserWarning"


@contextmanager
def _signals_later() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block: a starting process would log a failure."""
    if current_thread() is not main_thread():  # other threads receive no signals
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for one in before:
        signal.signal(one, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        for number in came:
            signal.raise_signal(number)


def _begin_process(parent_pid: int) -> None:
    try:
        own_child_process(parent_pid)
    except OrphanError:
        exit_process(1)


class Study:
    """Runs simulations in several processes, and stores outcomes in a folder; for ``with``."""

    def __init__(self, kept: Path | None, num_processes: int, on_progress: Callable[[str], None]) -> None:
        """``kept``: the folder; None = outcomes are not stored. One process is this one."""
        self._kept = kept
        self._num_processes = num_processes
        self._on_progress = on_progress
        self._pool: ProcessPoolExecutor | None = None  # of more than one process
        self._others: set[BaseProcess] = set()  # children from before the pool

    def __enter__(self) -> "Study":
        if self._num_processes == 1:
            return self
        if _NO_WORDS not in sys.warnoptions:
            sys.warnoptions.append(_NO_WORDS)
        self._others = set(active_children())
        # Spawned, not forked: a fork could inherit locks of threads that it does not have.
        self._pool = ProcessPoolExecutor(
            self._num_processes, get_context("spawn"), _begin_process, (os.getpid(),)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        if kind is not None:  # unused runs may take minutes
            for process in set(active_children()) - self._others:
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        self._pool = None
        gc.collect()  # frees the pool's semaphores now, not at interpreter exit

    def run(
        self, runs: Iterable[SimulatedRun], then: Then = lambda one, outcome: None
    ) -> dict[SimulatedRun, RunOutcome]:
        """Return the outcomes of all runs; stored ones are read.

        ``then``: called with each outcome; may return one more run, which does not delay others.
        Raises what a run raises, and ``ResourceError`` if an outcome cannot be stored.
        """
        assert self._num_processes == 1 or self._pool is not None, "inside a with statement"
        runs = list(dict.fromkeys(runs))
        found: dict[SimulatedRun, RunOutcome] = {}
        futures: dict[Future[RunOutcome], SimulatedRun] = {}
        wanted, num_done, began_s = runs, 0, time.monotonic()
        while wanted or futures:
            ended = {one: outcome for one in wanted if (outcome := self._read(one)) is not None}
            with _signals_later(), signals_held():
                futures |= {self._submit(one): one for one in wanted if one not in ended}
            for future in () if ended else self._finished(futures):
                one = futures.pop(future)
                ended[one] = future.result()
                self._write(one, ended[one])
                num_done += 1
                left_s = (time.monotonic() - began_s) / num_done * len(futures)
                num_runs = num_done + len(futures)
                self._on_progress(f"{num_done} of {num_runs} runs, {left_s:.0f} s left: {one.name}")
            found |= ended
            following = [then(one, outcome) for one, outcome in ended.items()]
            wanted = [one for one in following if one is not None]
        return {one: found[one] for one in (*runs, *found)}

    def _submit(self, one: SimulatedRun) -> Future[RunOutcome]:
        return Future() if self._pool is None else self._pool.submit(run, one)

    def _finished(self, futures: Mapping[Future[RunOutcome], SimulatedRun]) -> Collection[Future[RunOutcome]]:
        """Wait for at least one; without other processes, run the first."""
        if self._pool is not None:
            return wait(futures, return_when=FIRST_COMPLETED).done
        future, one = next(iter(futures.items()))
        future.set_result(run(one))
        return (future,)

    def _path(self, folder: Path, one: SimulatedRun) -> Path:
        return folder / f"{one.digest}.json"

    def _read(self, one: SimulatedRun) -> RunOutcome | None:
        if self._kept is None:
            return None
        try:
            data = self._path(self._kept, one).read_bytes()
            return msgspec.json.decode(data, type=RunOutcome)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise ResourceError(f"{self._kept}: an outcome cannot be read: {error}") from error

    def _write(self, one: SimulatedRun, outcome: RunOutcome) -> None:
        if self._kept is None:
            return
        path = self._path(self._kept, one)
        part = path.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(outcome))
            part.replace(path)
        except OSError as error:
            raise ResourceError(f"{path} cannot be written: {error}") from error
