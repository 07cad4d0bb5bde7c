"""An executor that computes nothing and takes as long as a latency model says.

It replaces ``gpu.execution.executor.DeviceExecutor`` alone; every decision is that of the serving
code.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...profiles.link import Direction, LinkStats
from ...profiles.models import MachineModel
from ...profiles.step_time import RowCosts, pass_s, row_costs
from ..adapter import AdapterFacts
from ..coldstart.cold import AdapterShape, ColdPart, ColdRequest, CoScheduledRows, layer_times
from ..coldstart.link import by_layer
from ..coldstart.predict import end_of
from ..plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    KvTransfer,
    NewRequest,
    Outcome,
    RequestId,
    Result,
    RowResult,
    StepId,
    StepPlan,
    StepResult,
    SubBatch,
    SubBatchKind,
    Transfer,
    TransferId,
    TransferRead,
    TransferResult,
    WorkersChanged,
)
from .loads import SimulatedLoads
from .machines import SimulatedMachine
from .replay import StepStats

END_TOKEN = 0
ORDINARY_TOKEN = 1


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row with deltas partly from workers, or with an adapter that is still loading."""

    row: int  # in its sub-batch
    facts: AdapterFacts
    on_host_s: Sequence[float]  # when each layer group is on the host, from the step's start
    arrival_s: Sequence[float]  # and on the device


@dataclass(frozen=True, slots=True)
class Pass:
    """A sub-batch of a step: one forward pass."""

    batch: SubBatch
    adapter_bytes: Sequence[int]  # by row; 0 = the base model
    waiting: Sequence[WaitingRow] = ()


def step_s(model: MachineModel, passes: Sequence[Pass]) -> float:
    """Duration of a step of these passes, one after the other; at most one has waiting rows.

    That pass takes as long as the planner predicts: its layers run one after the other, each
    bounded by its products, the workers' deltas and the arrival of its layer group.
    """
    separate_s = sum(pass_s(model, _costs(model, one)) for one in passes if not one.waiting)
    with_waiting = [one for one in passes if one.waiting]
    if not with_waiting:
        return model.host_step_s + separate_s
    # There would be more if rows were computed apart after a failure; here nothing fails.
    (held,) = with_waiting
    first, *more = (_part(held.batch, row) for row in held.waiting)
    request = ColdRequest(
        num_tokens=first.num_tokens,
        adapter=first.adapter,
        ready_s=first.ready_s,
        read_s=first.ready_s,  # of the layers below its split
        max_chunk_tokens=first.num_tokens,
        start_position=first.start_position,
        num_workers=model.num_workers,
    )
    co_scheduled = CoScheduledRows(_costs(model, held), separate_s, tuple(more))
    times = layer_times(model, request, first.num_tokens, co_scheduled)
    return separate_s + end_of(times, first.split_layer)


def _costs(model: MachineModel, one: Pass) -> RowCosts:
    batch = one.batch
    if not one.waiting:
        return row_costs(model, batch.num_tokens, batch.start_positions, one.adapter_bytes)
    waiting = {row.row for row in one.waiting}
    rows = [row for row in range(len(batch.num_tokens)) if row not in waiting]
    return row_costs(
        model,
        [batch.num_tokens[row] for row in rows],
        [batch.start_positions[row] for row in rows],
        [one.adapter_bytes[row] for row in rows],
    )


def _part(batch: SubBatch, waiting: WaitingRow) -> ColdPart:
    """A waiting row in the planner's form."""
    row, layers = waiting.row, waiting.facts.layers
    assert layers is not None
    split_layer = batch.split_layers[row]
    on_host_s, arrival_s = (
        by_layer(layers.group_of_layer, [max(0.0, time_s) for time_s in times_s])
        for times_s in (waiting.on_host_s, waiting.arrival_s)
    )
    return ColdPart(
        batch.num_tokens[row],
        AdapterShape(waiting.facts.num_bytes, layers.rank_sums),
        split_layer,
        on_host_s[:split_layer] + arrival_s[split_layer:],
        batch.start_positions[row],
    )


@dataclass(slots=True, eq=False)
class _Known:
    """The executor's state of a request."""

    num_prompt_tokens: int
    num_output_tokens: int  # how many it generates
    adapter_id: AdapterId
    adapter_bytes: int
    token: RowResult  # the result of a row that continues
    end: RowResult


@dataclass(slots=True, eq=False)
class _Step:
    plan: StepPlan
    end_s: float = math.inf  # inf while steps before it run
    start_s: float = math.inf
    adapters: set[AdapterId] = field(default_factory=set)


class LatencyExecutor:
    """Implements ``plan.Executor`` over a model of a machine. Works on virtual and real time."""

    def __init__(
        self,
        machine: SimulatedMachine,
        output_tokens: Mapping[RequestId, int],
        facts_of: Callable[[AdapterId], AdapterFacts],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        """Make an idle machine.

        Args:
            machine: Its latency model.
            output_tokens: After how many tokens each request ends by itself, including the end
                token. No other part reads them.
            facts_of: Returns the facts of an adapter.
            clock: Returns seconds.
            sleep: Waits on that clock.
        """
        self._model = machine.model
        self._block_bytes = machine.block_bytes
        self._loads_between_steps = machine.loads_between_steps
        self._output_tokens = output_tokens
        self._facts_of = facts_of
        self._clock = clock
        self._sleep = sleep
        self._loads = SimulatedLoads(machine.model.link, machine.file_bytes_per_s)
        self._known: dict[RequestId, _Known] = {}
        self._loading: dict[TransferId, AdapterId] = {}
        self._resident: set[AdapterId] = {BASE_ADAPTER}
        self._steps: deque[_Step] = deque()  # the first one runs
        self._last_step_id = StepId(0)
        self._step_stats = StepStats()
        self._results: list[Result] = []
        if machine.model.num_workers:
            self._results.append(WorkersChanged(machine.model.num_workers))
        self._event_fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, plan: StepPlan) -> None:
        now_s = self._clock()
        self._process_until(now_s)
        assert plan.step_id > self._last_step_id, "steps are submitted in order"
        self._last_step_id = plan.step_id
        for adapter_id in plan.evict_adapters:
            self._evict(adapter_id)
        for new in plan.new_requests:
            self._announce(new)
        if plan.host_move is not None:
            self._results.append(TransferResult(plan.host_move.transfer_id))
        if plan.load_order:
            self._loads.order(plan.load_order, now_s)
        if not self._loads_between_steps:
            self._begin_transfers(plan, now_s)
        for transfer_id in plan.promoted_transfers:
            self._loads.promote(transfer_id, now_s)
        step = _Step(plan, adapters=self._check_rows(plan))
        self._steps.append(step)
        if len(self._steps) == 1:
            self._begin_step(now_s)
        elif plan.transfers or plan.promoted_transfers or plan.load_order:
            self._expect_end()
        if self._loads_between_steps:
            self._begin_transfers(plan, step.end_s)

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        deadline_s = self._clock() + timeout_s
        self._process_until(self._clock())
        while not self._results and (now_s := self._clock()) < deadline_s:
            self._sleep(max(0.0, min(self._next_s(), deadline_s) - now_s))
            self._process_until(self._clock())
        results, self._results = self._results, []
        return results

    @property
    def result_at_s(self) -> float:
        """When ``poll`` next returns a result: now if it has one, inf if nothing is running."""
        return self._clock() if self._results else self._next_s()

    def fileno(self) -> int:
        """A descriptor that is never readable: results are due by time, which ``poll`` reads."""
        assert self._event_fd is not None
        return self._event_fd

    def close(self) -> None:
        if self._event_fd is not None:
            os.close(self._event_fd)
            self._event_fd = None

    def link_stats(self, direction: Direction) -> LinkStats:
        """Transfers over the link so far."""
        return self._loads.stats(direction, self._clock())

    def step_stats(self) -> StepStats:
        """Steps computed so far."""
        return self._step_stats

    def _next_s(self) -> float:
        step_s = self._steps[0].end_s if self._steps else math.inf
        return min(step_s, self._loads.next_s)

    def _process_until(self, now_s: float) -> None:
        while (next_s := self._next_s()) <= now_s:
            if self._steps and self._steps[0].end_s <= next_s:
                self._end_step(next_s)
                continue
            result = self._loads.process_next()
            if isinstance(result, TransferResult) and result.transfer_id in self._loading:
                self._resident.add(self._loading.pop(result.transfer_id))
            elif isinstance(result, TransferRead):
                self._expect_end()
            self._results.append(result)

    def _announce(self, new: NewRequest) -> None:
        request_id = new.request_id
        assert request_id not in self._known, f"request {request_id} is announced twice"
        is_base = new.adapter_id == BASE_ADAPTER
        self._known[request_id] = _Known(
            len(new.prompt_token_ids),
            self._output_tokens[request_id],
            new.adapter_id,
            0 if is_base else self._facts_of(new.adapter_id).num_bytes,
            RowResult(request_id, Outcome.TOKENS, (ORDINARY_TOKEN,)),
            RowResult(request_id, Outcome.TOKENS, (END_TOKEN,)),
        )

    def _evict(self, adapter_id: AdapterId) -> None:
        assert adapter_id in self._resident, f"adapter {adapter_id} is evicted but not there"
        in_use = any(adapter_id in step.adapters for step in self._steps)
        assert not in_use, f"adapter {adapter_id} is evicted while a step uses it"
        self._resident.remove(adapter_id)

    def _begin_transfers(self, plan: StepPlan, begin_s: float) -> None:
        for transfer in plan.transfers:
            self._begin_transfer(transfer, begin_s)

    def _begin_transfer(self, transfer: Transfer, now_s: float) -> None:
        if isinstance(transfer, KvTransfer):
            num_bytes = len(transfer.block_ids) * self._block_bytes
            self._loads.start_copy(transfer, num_bytes, now_s)
            return
        adapter_id = transfer.adapter_id
        known = self._resident.union(self._loading.values())
        assert adapter_id not in known, f"adapter {adapter_id} is loaded twice"
        facts = self._facts_of(adapter_id)
        assert facts.layers is not None, adapter_id
        self._loading[transfer.transfer_id] = adapter_id
        self._loads.start(transfer, facts.layers.group_bytes, now_s)

    def _check_rows(self, plan: StepPlan) -> set[AdapterId]:
        """Check that all rows can be computed; return the adapters that they use."""
        used = set()
        for batch in plan.sub_batches:
            adapters = {self._known[request_id].adapter_id for request_id in batch.request_ids}
            absent = adapters - self._resident
            if batch.kind is SubBatchKind.ASSISTED:
                absent.difference_update(self._loading.values())
            assert not absent, f"step {plan.step_id} uses adapters that are not there: {absent}"
            used |= adapters
        return used

    def _begin_step(self, now_s: float) -> None:
        step = self._steps[0]
        step.start_s = now_s + self._turn_s(step.plan)
        for request_id in step.plan.ended_requests:  # steps before this one may have had its rows
            self._known.pop(request_id, None)
        self._expect_end()

    def _turn_s(self, plan: StepPlan) -> float:
        """Time that the engine's core takes for a step; counted before the step."""
        model = self._model
        num_loads = sum(isinstance(transfer, AdapterTransfer) for transfer in plan.transfers)
        beside_s = model.request_s * len(plan.new_requests) + model.load_s * num_loads
        if not plan.sub_batches:
            return beside_s
        num_rows = sum(len(batch.request_ids) for batch in plan.sub_batches)
        return beside_s + model.turn_s + model.turn_row_s * num_rows

    def _expect_end(self) -> None:
        """Compute again when the running step ends: loads that it waits for may be later."""
        if self._steps:
            step = self._steps[0]
            step.end_s = step.start_s + self._step_s(step)

    def _step_s(self, step: _Step) -> float:
        """Duration of the step that began at ``step.start_s``, as far as it is known now."""
        if not step.plan.sub_batches:
            return 0.0
        return step_s(
            self._model,
            [
                Pass(
                    batch,
                    [self._known[request_id].adapter_bytes for request_id in batch.request_ids],
                    self._waiting_rows(batch, step.start_s),
                )
                for batch in step.plan.sub_batches
            ],
        )

    def _waiting_rows(self, batch: SubBatch, start_s: float) -> list[WaitingRow]:
        """Rows that workers assist, or that wait for layer groups."""
        rows = []
        for row, split_layer in enumerate(batch.split_layers):
            adapter_id = self._known[batch.request_ids[row]].adapter_id
            if adapter_id == BASE_ADAPTER:
                continue
            on_host_s, arrival_s = (
                [time_s - start_s for time_s in times_s] for times_s in self._loads.times_s(adapter_id)
            )
            if split_layer or arrival_s[-1] > 0.0:
                rows.append(WaitingRow(row, self._facts_of(adapter_id), on_host_s, arrival_s))
        return rows

    def _end_step(self, now_s: float) -> None:
        step = self._steps.popleft()
        plan = step.plan
        if plan.sub_batches:
            done = self._step_stats
            self._step_stats = StepStats(done.num_steps + 1, done.busy_s + step.end_s - step.start_s)
        rows: list[RowResult] = []
        for batch in plan.sub_batches:
            for request_id, start, number, has_sample in zip(
                batch.request_ids, batch.start_positions, batch.num_tokens, batch.samples, strict=True
            ):
                known = self._known.get(request_id)  # None: it has ended while it was in flight
                if has_sample and known is not None:
                    # A preempted request ends no later, though it is computed again.
                    num_sampled = start + number - known.num_prompt_tokens + 1
                    is_end = num_sampled >= known.num_output_tokens
                    rows.append(known.end if is_end else known.token)
        self._results.append(StepResult(plan.step_id, tuple(rows)))
        if self._steps:
            self._begin_step(now_s)
