"""One engine in this process, driven request by request, with times taken at its core.

The engine's thread is the calling one, pinned to one core, with one CPU worker on another. Between
cells the link, the workers' slowness and the planner's model of both are exchanged.
"""

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from corun.cpu_workers.pool import WorkerPool
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.cuda import CudaDevice
from corun.profiles.models import LinkModel, MachineModel
from corun.profiles.profile import Profile, save_profile
from corun.runtime.adapter import AdapterLayers
from corun.runtime.coldstart.planner import Planner, PlannerConfig
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import EngineAssembly, build_engine
from corun.runtime.engine.assembly.coexecution import Coexecution
from corun.runtime.engine.assembly.profiling import ProfileListener, run_profile
from corun.runtime.engine.messages import AddRequest
from corun.runtime.plan import RequestId
from corun.runtime.sampling import SamplingParams

from cold.waits import GroupWait, WaitRecorder
from cold.workload import Cell

CACHED = "cached"
PLANNER = "planner"
NEVER_WAIT = "planner, priority 0"
STRATEGIES = tuple(strategy.value for strategy in LoadStrategy)
_GIB = 2**30
_STEP_TIMEOUT_S = 1.0
_REQUEST_TIMEOUT_S = 120.0
_FREE_LINK_BYTES_PER_S = 50.0 * _GIB


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, in seconds from its arrival."""

    token_s: tuple[float, ...]
    decided: str = ""  # the strategy, where the planner chose
    waits: tuple[GroupWait, ...] = ()

    @property
    def first_s(self) -> float:
        """To the first token."""
        return self.token_s[0]

    @property
    def second_s(self) -> float:
        """To the second token."""
        return self.token_s[1]

    @property
    def end_s(self) -> float:
        """To the last token."""
        return self.token_s[-1]


@dataclass(frozen=True, slots=True)
class Slowness:
    """What the deltas of a cell come to."""

    worker_slowdown: float
    natural_ratio: float  # delta over base product at full speed, in the worst input group

    @property
    def ratio(self) -> float:
        """Delta over base product as it is measured."""
        return self.worker_slowdown * self.natural_ratio


class Rig:
    """See the module."""

    def __init__(self, assembly: EngineAssembly, vocab: int) -> None:
        coexecution = assembly.parts.coexecution
        assert coexecution is not None and coexecution.pool is not None, "co-execution is off"
        assert isinstance(assembly.parts.loaded.device, CpuDevice | CudaDevice)
        self.core = assembly.core
        self.summary = assembly.info.summary
        self._assembly = assembly
        self._link = assembly.parts.loaded.device.link
        self._coexecution: Coexecution = coexecution
        self.pool: WorkerPool = coexecution.pool
        self.profile: Profile = coexecution.profile
        self._waits = WaitRecorder(self.pool)
        # Elsewhere the host runs ahead of its waits.
        if isinstance(assembly.parts.loaded.device, CpuDevice):
            self._waits.watch(coexecution.assistant.handover)
        self._rng = random.Random(0)
        self._vocab = vocab
        self._next_id = 1
        self._planners: dict[str, Planner] = {}

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Random tokens."""
        return tuple(self._rng.randrange(3, self._vocab) for _ in range(num_tokens))

    def adapter_bytes(self, name: str) -> int:
        """What moves over the link."""
        return self._assembly.adapters.resolve(name).num_bytes

    def slowness(self, rank_sums: tuple[int, ...], num_tokens: int, ratio: float) -> Slowness:
        """What makes the deltas of the worst input group take ``ratio`` of its base product."""
        model = self.profile.model
        natural = max(
            model.job.part_s(rank_sum, group.width, num_tokens) / group.base_s.at(num_tokens)
            for group, rank_sum in zip(model.groups, rank_sums, strict=True)
            if rank_sum
        )
        return Slowness(max(1.0, ratio / natural), natural)

    def set_up(self, link_bytes_per_s: float, worker_slowdown: float) -> None:
        """Exchange link, workers and all planners, once nothing is under way."""
        self.finish()
        self._link.change_bandwidth(link_bytes_per_s / _GIB)
        self.pool.slowdown = worker_slowdown
        model = _changed(self.profile.model, link_bytes_per_s, worker_slowdown)
        self._planners = {
            strategy.value: Planner(model, PlannerConfig(forced=strategy)) for strategy in LoadStrategy
        }
        self._planners[PLANNER] = Planner(model)
        self._planners[NEVER_WAIT] = Planner(model, PlannerConfig(priority=0.0))

    def set_up_free(self) -> None:
        """A link and workers without delays, for the parts that are not measured."""
        self.set_up(_FREE_LINK_BYTES_PER_S, 1.0)

    def use(self, strategy: str) -> None:
        """Let cold requests start by ``strategy`` from now on, once nothing is under way."""
        self.finish()
        name = LoadStrategy.PIPELINED.value if strategy == CACHED else strategy
        self._coexecution.cold_starts.set_planner(self._planners[name])

    def prepare(self, adapter: str, *, is_cold: bool) -> None:
        """Bring the adapter onto the device, or off it, off the clock."""
        self.finish()
        if is_cold:
            if self._is_resident(adapter):
                assert self.core.evict_adapter(adapter), f"{adapter} is in use"
                self.finish()
        elif not self._is_resident(adapter):
            self.serve(self.prompt(1), adapter, 1)
            self.finish()
        self._waits.take()
        gc.collect()

    def serve(self, prompt: tuple[int, ...], adapter: str | None, num_tokens: int) -> Timing:
        """Run one request alone; returns when its last token is there."""
        message = self.request(prompt, adapter, num_tokens)
        times: list[float] = []
        decided = ""
        start_s = time.perf_counter()
        self.core.add_request(message)
        while len(times) < num_tokens:
            updates = self.core.step(_STEP_TIMEOUT_S)
            now_s = time.perf_counter() - start_s
            for update in updates:
                check_update(update.error)
                times += [now_s] * len(update.token_ids)
            if len(times) == 1 and not decided:
                decided = self._decision(message.request_id)
            if now_s > _REQUEST_TIMEOUT_S:
                raise TimeoutError(f"a request has {len(times)} tokens after {now_s:.0f} s")
        return Timing(tuple(times), decided, tuple(self._waits.take()))

    def request(self, prompt: tuple[int, ...], adapter: str | None, num_tokens: int) -> AddRequest:
        """A greedy request of exactly ``num_tokens`` tokens."""
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=0)
        self._next_id += 1
        return AddRequest(self._next_id, prompt, sampling, adapter)

    def finish(self) -> None:
        """Step until nothing is under way."""
        deadline_s = time.monotonic() + _REQUEST_TIMEOUT_S
        while self.core.has_work:
            for update in self.core.step(_STEP_TIMEOUT_S):
                check_update(update.error)
            if time.monotonic() > deadline_s:
                raise TimeoutError("the engine does not become idle")

    def rank_sums(self, adapter: str) -> tuple[int, ...]:
        """By input group of a layer: the ranks of the adapter's targets together."""
        return self._layers(adapter).rank_sums[0]

    def num_layer_groups(self, adapter: str) -> int:
        """Parts in which the adapter is loaded."""
        return len(self._layers(adapter).group_bytes)

    def _layers(self, adapter: str) -> AdapterLayers:
        layers = self._assembly.adapters.resolve(adapter).facts.layers
        assert layers is not None
        return layers

    def _is_resident(self, adapter: str) -> bool:
        version = self._assembly.adapters.resolve(adapter)
        return self.core.residency(version).level == "device"

    def _decision(self, request_id: int) -> str:
        decision = self._coexecution.cold_starts.decision(RequestId(request_id))
        return "" if decision is None else decision.strategy.value


def check_update(error: str | None) -> None:
    """Raise what a request failed with."""
    if error is not None:
        raise RuntimeError(f"a request failed: {error}")


def _changed(model: MachineModel, link_bytes_per_s: float, slowdown: float) -> MachineModel:
    """The profile's model with another link and slower workers, by arithmetic alone."""
    link = LinkModel(link_bytes_per_s, model.link.latency_s)
    return replace(model, job=model.job.slowed(slowdown), link=link)


@contextmanager
def start_rig(config: EngineConfig, vocab: int, on_progress: Callable[[str], None]) -> Iterator[Rig]:
    """Start an engine in this thread, with its workers; ended on exit."""
    allowed = os.sched_getaffinity(0)
    assembly = build_engine(config, on_progress=on_progress, own_process=True)
    try:
        rig = Rig(assembly, vocab)
        rig.set_up_free()
        gc.collect()
        gc.freeze()
        yield rig
    finally:
        assembly.close()
        gc.unfreeze()
        os.sched_setaffinity(0, allowed)


def engine_and_worker_cpus() -> tuple[int, int]:
    """The first and the last CPU that this process may use; exits if they are the same."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit("this needs two CPUs: one for the engine, one for the worker")
    return cpus[0], cpus[-1]


def make_config(
    model: Path, adapters: Path, profile: Path | None, cpus: tuple[int, int], device: str = "cpu"
) -> EngineConfig:
    """The options of every engine here: ``cpus`` of the engine and of the worker."""
    return EngineConfig(
        model=str(model),
        device=device,
        dtype="bfloat16",
        lora_dir=str(adapters),
        preload=("all",),
        engine_cores=str(cpus[0]),
        cpu_cores=str(cpus[1]),
        # Cells have links of their own; layer groups are sized for a link of similar speed.
        link_gib_per_s=0.5,
        max_num_seqs=16,
        profile=None if profile is None else str(profile),
        memory_gib=2.0,
    )


def with_measured_profile(
    config: EngineConfig, path: Path, budget_s: float, say: Callable[[str], None]
) -> EngineConfig:
    """Measure a profile as ``corun profile`` does, in so many seconds, and save it.

    Returns options of an engine with the measured kernels.
    """
    say(f"measuring a profile for about {budget_s:.0f} s")
    allowed = os.sched_getaffinity(0)
    listener = ProfileListener(say, lambda _: None, lambda _: None)
    profile = run_profile(config, budget_s, listener).profile
    os.sched_setaffinity(0, allowed)  # the thread was pinned, as an engine's is
    save_profile(profile, path)
    linear, attention, lora, *_ = profile.subject.settings.backends
    return replace(
        config, profile=str(path), linear_backend=linear, attention_backend=attention, lora_backend=lora
    )


def slowness_of(rig: Rig, cell: Cell) -> Slowness:
    """How much slower the worker must be in ``cell``."""
    return rig.slowness(rig.rank_sums(cell.adapter), cell.prompt_tokens, cell.delta_ratio)
