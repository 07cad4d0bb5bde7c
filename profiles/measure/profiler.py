"""Measures all parts of a profile."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from ...cpu_workers.errors import WorkerPoolError
from ...gpu.coexec.handover import Exchange
from ...gpu.device.host_memory import TorchDevice
from ...gpu.execution.assemble import LoadedModel, make_runner
from ...shm.errors import ShmError
from ..busy import CpuUse
from ..meter import Meter, OnReport
from ..profile import Profile, ProfileError, Subject
from ..rounds import Repeats
from .bank import AdapterBank
from .base import BaseTimes, measure_prefill
from .compose import Parts, compose
from .delta_bench import DeltaTask
from .deltas import DeltaTimes, measure_deltas
from .effort import BATCH_RANKS, BATCH_SIZES, REFERENCE_RANK, Effort
from .invocation import InvocationBench, InvocationTimes, WorkerOptions
from .link import LinkBench, LinkTimes
from .lora import LoraBench, LoraTimes
from .passes import Passes
from .shape import model_groups
from .step_shapes import StepShape, StepSizes, first_of_size, num_needed, step_shapes
from .steps import StepBench, WholeStepTimes, make_step_executor
from .stopwatch import stopwatch_of

_TRIAL_TOKENS = (16, 128)  # of the forwards for the estimate of the duration


_START_S = 2.0  # of a process with its libraries


def cut(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    """The ``sizes`` below ``limit``, and ``limit`` itself: the largest permitted size counts."""
    return (*(size for size in sizes if size < limit), limit)


def expected_s(
    effort: Effort,
    step_s: Callable[[int], float],
    max_tokens: int,
    shapes: Sequence[StepShape],
    *,
    has_workers: bool,
) -> dict[str, float]:
    """Seconds of each part, in their order.

    ``step_s``: one forward, by its number of tokens; ``shapes``: of the whole steps. A part ends
    after its last round or with its budget, whichever is sooner, but not before its minimum number
    of rounds over the sizes that it needs.
    """
    prefill = [step_s(min(n, max_tokens)) for n in effort.prefill_tokens for _ in effort.prefill_ranks]
    batches = [step_s(n) for n in BATCH_SIZES for _ in range(effort.num_batches)]
    first = first_of_size(shapes)  # these are measured with a forward beside them
    costs = {
        "base": [step_s(n) for n in cut(effort.step_tokens, max_tokens)],
        "steps": [(1 + (shape in first)) * step_s(shape.total_tokens) for shape in shapes],
        "lora_decode": batches,
        "lora_prefill": prefill,
    }
    needed = {"steps": num_needed(shapes)}
    result = {}
    for part in effort.parts:
        repeats = effort.repeats(part)
        seconds = repeats.budget_s
        if part in costs:
            seconds = _bounded_s(repeats, costs[part], needed.get(part, 2))
        elif part == "deltas":
            seconds += _START_S
        elif part == "invocation":
            seconds = seconds + _START_S if has_workers else 0.0
        result[part] = seconds
    return result


def _bounded_s(repeats: Repeats, costs_s: Sequence[float], num_sizes: int) -> float:
    least_s = (repeats.min_rounds + 1) * sum(costs_s[:num_sizes])
    return max(least_s, min(repeats.budget_s, (repeats.max_rounds + 1) * sum(costs_s)))


@dataclass(frozen=True, slots=True)
class Bench:
    """The measured model, device and CPUs."""

    loaded: LoadedModel
    device: TorchDevice  # with no operation enqueued yet; owned by the caller
    subject: Subject
    effort: Effort
    max_tokens: int  # of a step
    max_context: int  # of a row
    worker_cpus: tuple[int, ...]  # () = co-execution is off
    supervisor_cpus: tuple[int, ...]
    delta_cpu: int  # where a worker runs, or would
    coexecution_off: str  # why there are no workers
    free_bytes: int  # of the device's memory beside the model and, on CUDA, the largest step


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for progress."""

    on_estimate: Callable[[float], None]  # called once with the expected seconds
    on_report: OnReport


def measure_profile(bench: Bench, listener: Listener, cpu_use: Callable[[], CpuUse]) -> Profile:
    """Measure all parts and derive a profile.

    ``cpu_use``: the use of CPUs since before this call. Raises ``ProfileError`` if a part cannot
    be measured.
    """
    start_s = time.monotonic()
    try:
        with _Profiler(bench, listener) as profiler:
            parts = profiler.measure()
    except (WorkerPoolError, ShmError) as error:
        raise ProfileError(f"the profile cannot be measured: {error}") from error
    created_at = datetime.now(UTC).isoformat(timespec="seconds")
    return compose(
        bench.subject,
        bench.effort,
        parts,
        cpu_use(),
        created_at=created_at,
        measured_s=round(time.monotonic() - start_s, 1),
        free_bytes=bench.free_bytes,
    )


class _Profiler(contextlib.ExitStack):
    """One run over all parts."""

    def __init__(self, bench: Bench, listener: Listener) -> None:
        super().__init__()
        self._bench = bench
        self._effort = bench.effort
        self._listener = listener
        self._where = bench.loaded.model.device
        if self._where.type == "cuda":
            # Runs last: torch caches freed memory, and an engine plans by free memory.
            self.callback(torch.cuda.empty_cache)
        # Streams come before the device's first operation.
        self._link = LinkBench(bench.device, self._where, bench.effort.concurrency)
        self._exchange = self._make_exchange()
        self._groups = model_groups(bench.loaded)
        self._sizes = self._step_sizes()
        self._shapes = step_shapes(self._sizes)
        self._passes, self._steps = self._make_passes()

    def measure(self) -> Parts:
        """Measure all parts; adapters last, as they take memory."""
        expected = expected_s(
            self._effort,
            self._trial(),
            self._bench.max_tokens,
            self._shapes,
            has_workers=bool(self._bench.worker_cpus),
        )
        self._listener.on_estimate(sum(expected.values()))
        meter = Meter(expected, self._listener.on_report, time.monotonic)
        base = self._base(meter)
        steps = self._step_times(base, meter)
        link = self._link_times(meter)
        deltas = self._deltas(meter)
        invocation, off = self._invocation(deltas, meter)
        lora_decode, lora_prefill, bytes_per_rank = self._lora(meter)
        return Parts(
            groups=self._groups.shapes,
            num_workers=0 if invocation is None else len(self._bench.worker_cpus),
            max_tokens=self._bench.max_tokens,
            base=base,
            steps=steps,
            link=link,
            deltas=deltas,
            invocation=invocation,
            off=off,
            lora_decode=lora_decode,
            lora_prefill=lora_prefill,
            bytes_per_rank=bytes_per_rank,
        )

    def _make_exchange(self) -> Exchange:
        """Streams as in an engine; the calling thread computes on the first."""
        device = self._bench.device
        compute = device.stream("profile")
        transfer = compute
        if self._where.type == "cuda":
            transfer = device.stream("profile transfer", is_urgent=True)
            self.callback(torch.cuda.set_stream, torch.cuda.current_stream(self._where))
        device.adopt(compute)
        return Exchange(device, compute, transfer)

    def _step_sizes(self) -> StepSizes:
        bench, effort, layout = self._bench, self._effort, self._bench.loaded.layout
        kv_tokens = effort.max_kv_bytes * layout.block_size // layout.block_bytes
        max_chunk = min(max(effort.chunk_tokens), bench.max_tokens)
        max_context = min(max(effort.context_tokens), bench.max_context)
        return StepSizes(
            decode_rows=effort.decode_rows,
            chunk_tokens=cut(effort.chunk_tokens, max_chunk),
            context_tokens=cut(effort.context_tokens, max_context),
            max_kv_tokens=min(effort.max_kv_tokens, kv_tokens),
        )

    def _make_passes(self) -> tuple[Passes, StepBench]:
        """The parts that run forwards and whole steps, with one pool."""
        loaded, effort = self._bench.loaded, self._effort
        num_rows = max(*effort.decode_rows, *BATCH_SIZES)
        block_size, vocab_size = loaded.layout.block_size, int(loaded.config.vocab_size)
        num_blocks = max(
            Passes.num_blocks(self._bench.max_tokens, num_rows, block_size),
            StepBench.num_blocks(self._shapes, block_size),
        )
        runner = make_runner(loaded, num_blocks)
        for layer in range(len(loaded.layout.layers)):
            for part in runner.pool.layer(layer):
                part.zero_()  # reads of memory that was never written are faster
        executor = make_step_executor(loaded, runner, self._sizes.context_tokens[-1])
        self.callback(executor.close)
        passes = Passes(
            runner,
            loaded.lora_backend,
            stopwatch_of(self._where),
            vocab_size=vocab_size,
            num_groups=len(self._groups.shapes),
        )

        def forward_s(shape: StepShape) -> float:
            if shape.is_decode:
                return passes.forward_s(passes.decode_rows(len(shape.num_tokens)))
            return passes.forward_s(passes.prefill_rows(shape.total_tokens))

        return passes, StepBench(executor, forward_s, block_size, vocab_size)

    def _trial(self) -> Callable[[int], float]:
        """Rough seconds of a forward by its number of tokens: the line through two trials."""
        few, many = (min(n, self._bench.max_tokens) for n in _TRIAL_TOKENS)
        times_s = []
        for num_tokens in (few, many):
            rows = self._passes.prefill_rows(num_tokens)
            self._passes.forward_s(rows)
            times_s.append(self._passes.forward_s(rows))
        slope = max(0.0, times_s[1] - times_s[0]) / max(1, many - few)
        return lambda num_tokens: times_s[0] + slope * max(0, num_tokens - few)

    def _base(self, meter: Meter) -> BaseTimes:
        tokens = cut(self._effort.step_tokens, self._bench.max_tokens)
        on_progress = meter.begin("base", "base model, prefill")
        return measure_prefill(self._passes, tokens, self._effort.base, on_progress)

    def _step_times(self, base: BaseTimes, meter: Meter) -> WholeStepTimes:
        on_progress = meter.begin("steps", "whole steps")
        return self._steps.measure(self._shapes, base.step_s, self._effort.steps, on_progress)

    def _link_times(self, meter: Meter) -> LinkTimes:
        on_progress = meter.begin("link", "link to the device")
        return self._link.measure(self._effort.chunk_bytes, self._effort.link, on_progress)

    def _deltas(self, meter: Meter) -> DeltaTimes:
        bench, effort = self._bench, self._effort
        settings = bench.subject.settings
        limit = min(max(effort.delta_tokens), bench.max_tokens)
        task = DeltaTask(
            cpu=bench.delta_cpu,
            groups=self._groups.shapes,
            ranks=effort.delta_ranks,
            tokens=cut(effort.delta_tokens, limit),
            num_layers=self._groups.num_layers,
            backend=settings.delta_backend,
            repeats=effort.deltas,
        )
        on_progress = meter.begin("deltas", f"deltas on CPU {bench.delta_cpu}")
        return measure_deltas(task, settings.worker_slowdown, on_progress)

    def _invocation(self, deltas: DeltaTimes, meter: Meter) -> tuple[InvocationTimes | None, str]:
        """Measure with real workers; without any, return None and the reason."""
        bench, effort = self._bench, self._effort
        on_progress = meter.begin("invocation", "invocations of CPU workers")
        off = bench.coexecution_off
        if not off and bench.loaded.dtype != torch.bfloat16:
            off = f"workers compute bfloat16, and the model is {bench.subject.shape.dtype}"
        if off:
            return None, off
        settings = bench.subject.settings
        options = WorkerOptions(
            bench.worker_cpus,
            bench.supervisor_cpus,
            settings.delta_backend,
            settings.worker_slowdown,
            deltas.table(),
        )
        limit = min(max(effort.invocation_tokens), bench.max_tokens)
        tokens = cut(effort.invocation_tokens, limit)
        workers = InvocationBench(self._passes, bench.device, self._exchange, self._groups, limit, options)
        with contextlib.closing(workers):
            return workers.measure(tokens, deltas.job, effort.invocation, on_progress), ""

    def _lora(self, meter: Meter) -> tuple[LoraTimes, LoraTimes, float]:
        effort = self._effort
        num_rows = max(BATCH_SIZES)
        ranks = [BATCH_RANKS[index % len(BATCH_RANKS)] for index in range(num_rows)]
        bank = AdapterBank(self._bench.loaded, ranks, effort.max_adapters_bytes)
        self.callback(bank.close)
        lora = LoraBench(self._passes, bank)
        limit = min(max(effort.prefill_tokens), self._bench.max_tokens)
        decode = lora.decode(
            effort.num_batches,
            effort.lora_decode,
            meter.begin("lora_decode", "adapters on the device, decode"),
        )
        prefill = lora.prefill(
            cut(effort.prefill_tokens, limit),
            effort.prefill_ranks,
            effort.lora_prefill,
            meter.begin("lora_prefill", "adapters on the device, prefill"),
        )
        return decode, prefill, bank.bytes_of(REFERENCE_RANK) / REFERENCE_RANK
