"""The cells of ``replays.cells`` on an engine that computes: the CPU device of this process.

The engine's core has one core of the machine, a CPU worker another one, and the link between them
is emulated. Requests end where the workload says, independent of the model, so the simulator and
the engine serve the same requests; the policies get no more information than in a simulation.

Other guests of the same host, which are invisible here, take memory bandwidth: the same steps may
take 1.5 times as long a few minutes later. So a probe, with the same requests of the base model
each time, is timed after the profile is measured and before and after each cell. Their ratio is the
slowdown of the machine.
"""

import gc
import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
from cold.rig import make_config, with_measured_profile
from cold.workload import SIZES
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.link import PacedLink
from corun.profiles.derive import min_group_bytes
from corun.profiles.models import LinkModel
from corun.profiles.profile import Profile, load_profile, save_profile
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import EngineAssembly, build_engine
from corun.runtime.engine.core import CoreConfig, EngineCore
from corun.runtime.engine.messages import AddRequest
from corun.runtime.plan import Executor, Outcome, RequestId, Result, RowResult, StepPlan, StepResult
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.step_times import ProfiledTimes
from corun.runtime.sim.engine import adapter_name, requests_of
from corun.runtime.sim.figures import Figures, figures_of
from corun.runtime.sim.machines import SimulatedMachine
from corun.runtime.sim.replay import StepStats, replay
from corun.runtime.sim.workloads import Workload, make_workload
from models import ALL_TARGETS, ATTENTION_TARGETS, VOCAB_SIZE, save_adapter, save_model

from replays.cells import Cell, OraclePredictor, options_of, predictor_of, workload_of
from replays.kept import PRODUCT
from replays.quiet import measured_quietly

_GIB = 2**30
_MODEL = SIZES["small"]
_MODEL.max_position_embeddings = 16_384  # the longest of Mooncake's prompts by 16, and more
_MAX_BATCHED_TOKENS, _MAX_SEQS, _BLOCK_SIZE = 64, 64, 16
_ARENA_BYTES = 2 * _GIB  # all adapters, always
_MEASURED_LINK_GIB = 0.5  # while the profile is measured; cells have links of their own
_PROBE_MEMORY_GIB = 0.0757  # as cells of S1 have it: the more, the longer the same requests take
_FILE_BYTES_PER_S = 1e9  # nothing is read from files: the host has all adapters
_MEAN_REQUESTS = 5000  # that the means of a recipe are taken of
_WARM_REQUESTS, _WARM_TOKENS, _WARM_TIMEOUT_S = 8, 8, 120.0
_PROBE_PROMPTS, _PROBE_TOKENS, _PROBE_REPEATS = (64,) * 8, 24, 3
_probe_tokens = itertools.cycle(range(1000, 7000, 2 * len(_PROBE_PROMPTS)))
_MAX_PADDING = 0.02  # of an adapter, as a share of its bytes
_ORDINARY_TOKEN, _FIRST_TOKEN = 3, 4  # of vocabularies with a smaller end token
# Adapters of so many bytes that both memory ratios of a column can be had with one pool.
_TARGETS = (ATTENTION_TARGETS[:1], ("q_proj", "v_proj"), ATTENTION_TARGETS, ALL_TARGETS)
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@dataclass(frozen=True, slots=True)
class Pressure:
    """What memory and link are chosen by."""

    name: str
    load_over_prefill: float  # of the mean adapter on the link, over that of the mean prompt
    adapters_over_pool: float  # bytes of all adapters
    kv_over_pool: float  # bytes of the KV of all requests of a cell: those that have ended, too


PRESSED = Pressure("pressed", 0.5, 1.5, 1.2)
FREE = Pressure("free", 0.1, 0.5, 0.5)
PRESSURES = {one.name: one for one in (PRESSED, FREE)}


@dataclass(frozen=True, slots=True)
class Column:
    """A machine like this one with a pool and a link of its own, and what they come to."""

    machine: SimulatedMachine
    targets: tuple[str, ...]  # of the adapters
    reached: Pressure

    def describe(self) -> str:
        """For people."""
        link, reached = self.machine.model.link, self.reached
        return (
            f"{self.machine.name}: pool {self.machine.memory_bytes / 2**20:.1f} MiB, link "
            f"{link.bytes_per_s / 2**20:.1f} MiB/s, adapters on {'+'.join(self.targets)}; load / "
            f"prefill {reached.load_over_prefill:.2f}, adapters / pool "
            f"{reached.adapters_over_pool:.2f}, KV / pool {reached.kv_over_pool:.2f}"
        )


def make_column(
    profile: Profile, recipe: str, pressure: Pressure, num_requests: int, traces: Path | None
) -> Column:
    """Choose memory, link and targets for cells of so many requests. Raises ``ConfigError``."""
    many = make_workload(recipe, rate_rps=1.0, num_requests=_MEAN_REQUESTS, seed=0, traces=traces)
    of_cell = make_workload(recipe, rate_rps=1.0, num_requests=num_requests, seed=0, traces=traces)
    kv_bytes_per_token = _kv_bytes_per_token()
    tokens = statistics.fmean(one.prompt_tokens + one.output_tokens for one in many.requests)
    kv_bytes = num_requests * tokens * kv_bytes_per_token
    wanted_bytes = kv_bytes * pressure.adapters_over_pool / pressure.kv_over_pool
    sum_of_ranks = sum(of_cell.ranks)
    targets = min(_TARGETS, key=lambda one: abs(_bytes_per_rank(one) * sum_of_ranks - wanted_bytes))
    per_rank = _bytes_per_rank(targets)
    adapter_bytes = per_rank * sum_of_ranks
    memory_bytes = int(adapter_bytes / pressure.adapters_over_pool)
    mean_bytes = per_rank * statistics.fmean(many.ranks[one.adapter] for one in many.requests)
    mean_prompt = round(statistics.fmean(one.prompt_tokens for one in many.requests))
    times = ProfiledTimes(profile.model, _MAX_BATCHED_TOKENS)
    prefill_s = times.prefill_s(mean_prompt, round(mean_bytes))
    link = LinkModel(mean_bytes / (pressure.load_over_prefill * prefill_s), profile.model.link.latency_s)
    machine = SimulatedMachine(
        name=f"here-{pressure.name}",
        model=replace(profile.model, link=link),
        memory_bytes=memory_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        adapter_bytes_per_rank=per_rank,
        group_targets=tuple(sum(one in targets for one in group) for group in _GROUPS),
        file_bytes_per_s=_FILE_BYTES_PER_S,
        block_size=_BLOCK_SIZE,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        max_num_seqs=_MAX_SEQS,
        has_pages=False,
    )
    reached = Pressure(
        pressure.name, pressure.load_over_prefill, adapter_bytes / memory_bytes, kv_bytes / memory_bytes
    )
    return Column(machine, targets, reached)


def _kv_bytes_per_token() -> int:
    head = _MODEL.hidden_size // _MODEL.num_attention_heads
    return int(2 * 2 * head * _MODEL.num_key_value_heads * _MODEL.num_hidden_layers)


def _bytes_per_rank(targets: Sequence[str]) -> int:
    hidden, inner = _MODEL.hidden_size, _MODEL.intermediate_size
    kv = hidden // _MODEL.num_attention_heads * _MODEL.num_key_value_heads
    widths = {
        "q_proj": hidden + hidden,
        "k_proj": hidden + kv,
        "v_proj": hidden + kv,
        "o_proj": hidden + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return int(2 * _MODEL.num_hidden_layers * sum(widths[target] for target in targets))


class RealEngines:
    """Makes an engine for each cell, from files that it makes once."""

    def __init__(
        self, files: Path, kept: Path, cpus: tuple[int, int], profile_s: float, say: Callable[[str], None]
    ) -> None:
        """Measure this machine, unless ``kept`` has the profile of a run that was stopped."""
        self._files = files
        save_model(_MODEL, files / "model")
        config = replace(
            make_config(files / "model", files, None, cpus),
            lora_dir=None,
            preload=("all",),
            linear_backend="numba",  # else each engine chooses these two by a measurement
            # Each kind of pass costs as much as several to capture, once in the life of a server,
            # and here in every run of 20 s.
            decode_graphs="off",
            cpu_threads=1,
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            max_num_seqs=_MAX_SEQS,
            block_size=_BLOCK_SIZE,
            link_gib_per_s=_MEASURED_LINK_GIB,
        )
        path = kept / "profile.json"
        if not path.exists():
            kept.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            measured_quietly(lambda: with_measured_profile(config, part, profile_s, say), cpus, say)
            os.replace(part, path)
        self.profile = load_profile(path)
        linear, attention, lora, *_ = self.profile.subject.settings.backends
        self._config = replace(config, linear_backend=linear, attention_backend=attention, lora_backend=lora)
        self._probe_s = self._kept_probe_s(kept / "probe_s", path)

    def _kept_probe_s(self, kept: Path, profile: Path) -> float:
        """What the probe takes on the machine as it was when the profile was measured."""
        if not kept.exists():
            config = replace(self._config, profile=str(profile), preload=(), memory_gib=_PROBE_MEMORY_GIB)
            with _engine(config) as assembly:
                _warm_up(assembly.core)
                probe_s = _probe_s(assembly.core)
            kept.write_text(str(probe_s))
        return float(kept.read_text())

    def run(self, cell: Cell, column: Column, traces: Path | None) -> tuple[Figures, float]:
        """Let a new engine serve the cell's requests, in real time.

        Its figures, and how many times as long as at the time of the profile steps took beside it.
        """
        workload = workload_of(cell, traces)
        config = self._config_of(cell, column, workload)
        arrivals = _arrivals(cell, workload)
        with _engine(config) as assembly:
            _check(assembly, column.machine, workload)
            _warm_up(assembly.core)
            before_s = _probe_s(assembly.core)
            parts = assembly.parts
            assert isinstance(parts.loaded.device, CpuDevice)
            executor = ScriptedExecutor(
                parts.executor, workload, assembly.info.eos_token_ids[0], clock=time.monotonic
            )
            core = EngineCore(
                parts.scheduler,
                executor,
                assembly.adapters,
                CoreConfig(base_fingerprint=column.machine.name, dtype="bfloat16"),
                clock=time.monotonic,
            )
            replayed = replay(
                core,
                arrivals,
                time.monotonic,
                time.sleep,
                parts.loaded.device.link.stats,
                executor.step_stats,
            )
            after_s = _probe_s(assembly.core)
        slowness = (before_s + after_s) / 2 / self._probe_s
        return figures_of(replayed, workload, column.machine), slowness

    def _config_of(self, cell: Cell, column: Column, workload: Workload) -> EngineConfig:
        options, machine = options_of(cell), column.machine
        assert isinstance(options.scheduling_policy, str) and isinstance(options.memory_policy, str)
        return replace(
            self._config,
            profile=str(self._profile_of(column)),
            link_gib_per_s=machine.model.link.bytes_per_s / _GIB,
            memory_gib=machine.memory_bytes / _GIB,
            lora_dir=str(self._adapters_of(column.targets, workload.ranks)),
            scheduling_policy=options.scheduling_policy,
            memory_policy=options.memory_policy,
            growth_headroom=options.growth_headroom,
            prefix_cache="on" if options.prefix_cache else "off",
            host_bytes=str(_ARENA_BYTES + (options.host_bytes or 0)),
            adapter_memory_fraction=options.adapter_memory_fraction,
            load_strategy="auto" if cell.load_strategy is None else cell.load_strategy.value,
        )

    def _profile_of(self, column: Column) -> Path:
        """The profile with the column's link in it."""
        path = self._files / f"profile-{column.machine.name}.json"
        if not path.exists():
            link = column.machine.model.link
            subject = self.profile.subject
            text = PacedLink(link.bytes_per_s / _GIB).describe()
            with_link = replace(
                self.profile,
                model=column.machine.model,
                min_group_bytes=min_group_bytes(link),
                subject=replace(subject, settings=replace(subject.settings, link=text)),
            )
            save_profile(with_link, path)
        return path

    def _adapters_of(self, targets: Sequence[str], ranks: Sequence[int]) -> Path:
        """A directory of adapters of these ranks."""
        name = hashlib.sha256(repr((targets, ranks)).encode()).hexdigest()[:16]
        directory = self._files / f"adapters-{name}"
        if not directory.exists():
            for index, rank in enumerate(ranks):
                save_adapter(directory / adapter_name(index), _MODEL, rank, targets, seed=index)
        return directory


class ScriptedExecutor:
    """Has each request end when its workload says so, and notes how long steps take."""

    def __init__(
        self, executor: Executor, workload: Workload, end_token: int, *, clock: Callable[[], float]
    ) -> None:
        self._executor = executor
        self._workload = workload
        self._end_token = end_token
        self._clock = clock
        self._steps: dict[int, tuple[StepPlan, float]] = {}
        self._num_steps, self._busy_s = 0, 0.0

    def submit(self, plan: StepPlan) -> None:
        if plan.sub_batches:
            self._steps[plan.step_id] = plan, self._clock()
        self._executor.submit(plan)

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        results = self._executor.poll(timeout_s)
        return [self._scripted(one) if isinstance(one, StepResult) else one for one in results]

    def fileno(self) -> int:
        return self._executor.fileno()

    def close(self) -> None:
        self._executor.close()

    def step_stats(self) -> StepStats:
        return StepStats(self._num_steps, self._busy_s)

    def _scripted(self, result: StepResult) -> StepResult:
        if result.step_id not in self._steps:
            return result
        plan, start_s = self._steps.pop(result.step_id)
        self._num_steps += 1
        self._busy_s += self._clock() - start_s
        ends = {
            request_id: start + number
            for batch in plan.sub_batches
            for request_id, start, number in zip(
                batch.request_ids, batch.start_positions, batch.num_tokens, strict=True
            )
        }
        rows = tuple(self._row(row, ends[row.request_id]) for row in result.rows)
        return replace(result, rows=rows)

    def _row(self, row: RowResult, num_computed: int) -> RowResult:
        if row.outcome is not Outcome.TOKENS:
            return row
        request = self._workload.requests[row.request_id - 1]
        is_end = num_computed - request.prompt_tokens + 1 >= request.output_tokens
        return replace(row, token_ids=(self._end_token if is_end else _ORDINARY_TOKEN,))


def _arrivals(cell: Cell, workload: Workload) -> list[tuple[float, AddRequest]]:
    """As the simulation has them, with tokens of the model's and the oracle's predictions."""
    tokens: dict[int, int] = {}
    numbers = itertools.count(_FIRST_TOKEN)
    arrivals = requests_of(workload)
    for _, message in arrivals:
        for token_id in dict.fromkeys(message.prompt_token_ids):
            if token_id not in tokens:
                tokens[token_id] = next(numbers)
    assert max(tokens.values()) < VOCAB_SIZE, "more contents than the vocabulary can tell apart"
    oracle = predictor_of(
        cell, {RequestId(i): one.output_tokens for i, one in enumerate(workload.requests, start=1)}
    )
    return [
        (
            arrival_s,
            msgspec.structs.replace(
                message,
                prompt_token_ids=tuple(tokens[token_id] for token_id in message.prompt_token_ids),
                predicted_output_tokens=(
                    oracle.predicted(RequestId(message.request_id))
                    if isinstance(oracle, OraclePredictor)
                    else None
                ),
            ),
        )
        for arrival_s, message in arrivals
    ]


@contextmanager
def _engine(config: EngineConfig) -> Iterator[EngineAssembly]:
    """In this thread, with its worker; ended on exit."""
    allowed = os.sched_getaffinity(0)
    assembly = build_engine(config, on_progress=lambda _: None, own_process=True)
    try:
        gc.collect()
        gc.freeze()
        yield assembly
    finally:
        assembly.close()
        gc.unfreeze()
        os.sched_setaffinity(0, allowed)


def _check(assembly: EngineAssembly, machine: SimulatedMachine, workload: Workload) -> None:
    """Assert that the simulated machine has the sizes of the real one."""
    assert assembly.parts.loaded.layout.block_bytes == machine.block_bytes
    for index, rank in enumerate(workload.ranks):
        facts = assembly.adapters.resolve(adapter_name(index)).facts
        modelled = machine.adapter_facts(facts.digest, rank)
        assert facts.layers is not None and modelled.layers is not None
        assert facts.layers.rank_sums == modelled.layers.rank_sums, (facts, modelled)
        assert facts.layers.group_of_layer == modelled.layers.group_of_layer, (facts, modelled)
        beyond = facts.num_bytes / modelled.num_bytes - 1  # each layer is padded
        assert 0.0 <= beyond <= _MAX_PADDING, (facts, modelled)


def _warm_up(core: EngineCore) -> None:
    """Compute a prompt of each size and rows that decode, so that what is made once is there."""
    _compute(core, [16 * number for number in range(1, _WARM_REQUESTS + 1)], _WARM_TOKENS)


def _probe_s(core: EngineCore) -> float:
    """Seconds for the same requests of the base model each time; the median of some."""
    # Each time other tokens, which no engine finds in what it has kept.
    return statistics.median(
        _compute(core, _PROBE_PROMPTS, _PROBE_TOKENS, next(_probe_tokens)) for _ in range(_PROBE_REPEATS)
    )


def _compute(
    core: EngineCore, prompts: Sequence[int], max_tokens: int, token_id: int = _ORDINARY_TOKEN
) -> float:
    """Let requests with prompts of these lengths run at once; return how many seconds it took."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    start_s = time.monotonic()
    for number, num_tokens in enumerate(prompts, start=1):
        core.add_request(AddRequest(-number, (token_id + number,) * num_tokens, sampling))
    while core.has_work:
        for update in core.step(1.0):
            if update.error is not None:
                raise RuntimeError(update.error)
        if time.monotonic() > start_s + _WARM_TIMEOUT_S:
            raise TimeoutError("the engine does not become idle")
    return time.monotonic() - start_s


@cache
def product_digest() -> str:
    """Of all code that is measured, and of this file."""
    digest = hashlib.sha256()
    folders = ("cpu_workers", "gpu", "profiles", "runtime", "shm")
    paths = [path for folder in folders for path in (PRODUCT / folder).rglob("*.py")]
    for path in (*sorted(paths), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
