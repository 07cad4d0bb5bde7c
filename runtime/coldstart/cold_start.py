"""Cold starts for the scheduler: records decisions and plans chunks.

Connects the planner, which predicts times, with the table of open transfers. Pure: the current time
is an argument.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ..adapter import AdapterLayers
from ..memory.transfers import OpenLoad, TransferTable
from ..plan import RequestId, StepId, TransferId
from ..request import Request
from ..scheduler.cold import ColdChunk, ColdStarts, StepRows
from ..scheduler.events import AdapterStart
from ..scheduler.recovery import may_use_workers, needs_whole_adapter
from .cold import (
    AdapterShape,
    ColdPart,
    ColdRequest,
    CoScheduledRows,
    co_scheduled_decodes,
    co_scheduled_rows,
    warm_step_s,
)
from .link import FileForecast, LinkForecast, by_layer, in_order, ready_s
from .observations import DelayTracker, FirstTokens
from .planner import Planner
from .strategy import AT_ONCE, Decision, LoadStrategy

_MIN_CHUNK_TOKENS = 16


class PlannedColdStarts(ColdStarts):
    """Starts requests as a planner decides. Requests with unknown or failed loads wait."""

    def __init__(self, planner: Planner, worker_tokens: Sequence[int], transfers: TransferTable) -> None:
        """Start without decisions.

        Args:
            planner: Chooses strategies. Its model also predicts chunks.
            worker_tokens: By number of ready workers, from 0 on: tokens of one step that they
                compute.
            transfers: Open transfers of the memory.
        """
        self.transfers = transfers
        self._planner = planner
        self._worker_tokens = worker_tokens
        self._num_workers = 0
        self._link = LinkForecast(planner.model.link, transfers)
        self._files = FileForecast(transfers)
        self._first_tokens = FirstTokens(transfers)
        self._delays = DelayTracker()
        self._decisions: dict[RequestId, Decision] = {}
        # Of requests that wait for loads: these, and what a second of delay costs, once needed.
        self._undelayed: dict[RequestId, tuple[TransferId, ColdRequest]] = {}
        self._losses: dict[RequestId, tuple[TransferId, float]] = {}
        self._blocking: set[TransferId] = set()
        self._counts: Counter[str] = Counter()

    @property
    def file_bytes_per_s(self) -> float:
        """Estimated rate at which adapter files are read."""
        return self._files.bytes_per_s

    def set_planner(self, planner: Planner) -> None:
        """Use another planner from now on."""
        self._planner = planner
        self._link = LinkForecast(planner.model.link, self.transfers)

    def workers_changed(self, num_ready: int) -> None:
        """Set the number of workers that take jobs."""
        self._num_workers = num_ready

    def files_read(self, num_bytes: int, duration_s: float) -> None:
        self._files.record(num_bytes, duration_s)

    def may_start(self, request: Request, num_others: int, rows: StepRows, now_s: float) -> bool:
        """Whether a request with a loading adapter starts now. The first call decides."""
        load = self.transfers.load_of(request.adapter_id)
        if load is None:
            return False
        if not may_use_workers(request):
            self._waits_for_all(request, load)
            return False
        decision = self._decisions.get(request.request_id)
        if decision is None:
            decision = self._decide(request, load, num_others, rows, now_s)
            self._decisions[request.request_id] = decision
            self._counts[decision.strategy.value] += 1
            if decision.strategy is LoadStrategy.BLOCKING:
                self._blocking.add(load.transfer_id)
        if decision.strategy in AT_ONCE:
            return True
        self._waits_for_all(request, load)
        return False

    def waits(self, request: Request) -> None:
        load = self.transfers.load_of(request.adapter_id)
        if load is not None and request.request_id not in self._decisions:
            self._waits_for_all(request, load)

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        """Return the largest chunk with which the step stays within the configured share of waits.

        None while a later start costs less. The scheduler calls again when a layer group arrives or
        the load ends.
        """
        load = self.transfers.load_of(request.adapter_id)
        if load is None:
            return None  # the load has failed, and the request ends soon
        if needs_whole_adapter(request):
            self._waits_for_all(request, load)
            return None
        if load.num_on_host == 0:
            return None  # without a read layer group it has no place on the device
        cold = self._cold_request(request, load, num_others, rows, now_s)
        chunk = self._cut(request, cold, max_tokens)
        if chunk is None:
            self._first_tokens.skipped(request.request_id)
            return None
        co_scheduled = cold.co_scheduled
        if self._first_tokens.has_begun(request.request_id):
            co_scheduled = cold.later_co_scheduled  # as the prediction assumed
        part = ColdPart(chunk.num_tokens, cold.adapter, chunk.split_layer, cold.ready_s, cold.start_position)
        self._first_tokens.planned(
            request.request_id,
            warm_step_s(self._planner.model, co_scheduled.with_row(part)),
            is_last=chunk.num_tokens == request.num_pending_tokens,
        )
        return chunk

    def step_closed(self, step_id: StepId, rows: StepRows, now_s: float) -> None:
        """Record the predicted time of the step without waits.

        This also shows by how much rows that joined later prolong the steps of cold requests.
        """
        for request, chunk in rows.cold_chunks:
            load = self.transfers.load_of(request.adapter_id)
            assert load is not None, request.request_id
            load.is_awaited |= chunk.split_layer < self._planner.model.num_layers
        self._order_loads(now_s)
        step_s = 0.0
        if rows.chunks or rows.cold_chunks:
            step_s = warm_step_s(self._planner.model, self._co_scheduled(rows, None))
        cold = [request.request_id for request, _ in rows.cold_chunks]
        has_others = bool(rows.decodes or rows.chunks)
        begins_s = self._planner.model.load_s * self.transfers.num_loads_to_begin
        self._delays.closed(
            step_id,
            cold,
            step_s,
            now_s,
            has_others=has_others,
            begins_s=begins_s,
            is_loading=self.transfers.num_loads > 0,
        )
        self._first_tokens.step_closed(step_s)

    def step_ended(self, step_id: StepId, now_s: float) -> None:
        """Compare the duration of the step with its prediction."""
        observation = self._delays.ended(step_id, now_s)
        if observation is not None:
            self._planner.observe_stall(*observation)

    def blocks_all_requests(self) -> bool:
        """Whether a blocking load is under way."""
        self._blocking = {one for one in self._blocking if one in self.transfers}
        return bool(self._blocking)

    def decision(self, request_id: RequestId) -> Decision | None:
        """Return the decision for an open cold request, if any."""
        return self._decisions.get(request_id)

    def on_first_token(self, request_id: RequestId, now_s: float) -> AdapterStart | None:
        """Compare the time of the first token with its prediction. Return how it was started."""
        self._forget_loss(request_id)
        decision = self._decisions.get(request_id)
        if decision is None:
            return None
        observation = self._first_tokens.on_first_token(request_id, now_s)
        if observation is not None:
            self._planner.observe(*observation)
        return AdapterStart(decision.strategy.value, decision.reason)

    def counts(self) -> Mapping[str, int]:
        """Return the number of cold requests by strategy."""
        return self._counts

    def discard(self, request_id: RequestId) -> None:
        """Drop the record of a request that has ended."""
        self._decisions.pop(request_id, None)
        self._forget_loss(request_id)
        self._first_tokens.discard(request_id)

    def _decide(
        self, request: Request, load: OpenLoad, num_others: int, rows: StepRows, now_s: float
    ) -> Decision:
        """Let the planner decide. It does not learn from requests that wait for files."""
        cold = self._cold_request(request, load, num_others, rows, now_s)
        decision = self._planner.decide(cold)
        alone_s = self._on_device_s(load, self._alone_s(load), now_s)
        self._undelayed[request.request_id] = load.transfer_id, replace(cold, ready_s=alone_s)
        if load.is_from_files:
            return replace(decision, reason=f"{decision.reason}; its files must be read first")
        if decision.predictions:
            self._first_tokens.expect(
                request.request_id,
                load.transfer_id,
                decision.predictions[0],
                now_s,
                is_at_once=decision.strategy in AT_ONCE,
            )
        return decision

    def _waits_for_all(self, request: Request, load: OpenLoad) -> None:
        """Record that the request waits for the whole load, so it loses each second of delay."""
        self._undelayed.pop(request.request_id, None)
        self._losses[request.request_id] = load.transfer_id, 1.0

    def _forget_loss(self, request_id: RequestId) -> None:
        self._undelayed.pop(request_id, None)
        self._losses.pop(request_id, None)

    def _order_loads(self, now_s: float) -> None:
        """Set the order in which loads use the link."""
        loads = self.transfers.loads_in_turn()
        if len(loads) < 2:
            return
        link = self._planner.model.link
        delay_s = sum(sum(load.part_bytes) for load in loads) / link.bytes_per_s
        for request_id, (transfer_id, cold) in self._undelayed.items():
            if transfer_id in self.transfers:
                loss = self._planner.loss_per_s(cold, delay_s)
                self._losses[request_id] = transfer_id, loss
        self._undelayed.clear()
        losses = defaultdict[TransferId, float](float)
        for transfer_id, loss in self._losses.values():
            losses[transfer_id] += loss
        self.transfers.order_loads(in_order(loads, losses, link.bytes_per_s, now_s), now_s)

    def _alone_s(self, load: OpenLoad) -> tuple[float, ...]:
        """Return by layer group the seconds until it arrives if nothing else uses the link."""
        link = self._planner.model.link
        left_bytes = (0,) * load.num_arrived + load.part_bytes[load.num_arrived :]
        ends_s = accumulate(size / link.bytes_per_s for size in left_bytes)
        return tuple(end_s and link.latency_s + end_s for end_s in ends_s)

    def _cut(self, request: Request, cold: ColdRequest, max_tokens: int) -> ColdChunk | None:
        """Return the next chunk; None if a later one costs less, or each delays a step too long."""
        strategy = self._strategy_of(request)
        num_tokens = min(request.num_pending_tokens, max_tokens)
        if strategy is LoadStrategy.ASSISTED:
            if cold.max_assisted_tokens:
                num_tokens = min(num_tokens, cold.max_assisted_tokens)
            else:
                strategy = LoadStrategy.PIPELINED
        is_bounded = cold.num_running and self._planner.config.max_stall_share is not None
        while (step := self._planner.step_now(cold, num_tokens, strategy)) is None:
            if not is_bounded or num_tokens <= _MIN_CHUNK_TOKENS:
                return None
            num_tokens = max(_MIN_CHUNK_TOKENS, num_tokens // 2)
        self._delays.planned(request.request_id, strategy, step.wait_s)
        return ColdChunk(num_tokens, step.split_layer)

    def _strategy_of(self, request: Request) -> LoadStrategy:
        if not may_use_workers(request):
            return LoadStrategy.PIPELINED
        return self._decisions[request.request_id].strategy

    def _cold_request(
        self, request: Request, load: OpenLoad, num_others: int, rows: StepRows, now_s: float
    ) -> ColdRequest:
        co_scheduled = self._co_scheduled(rows, now_s)
        num_assisted_tokens = sum(part.num_tokens for part in co_scheduled.cold if part.split_layer)
        max_assisted_tokens = self._worker_tokens[self._num_workers]
        return ColdRequest(
            num_tokens=max(1, request.num_pending_tokens),
            adapter=_shape(load),
            ready_s=self._ready_s(load, now_s),
            read_s=self._read_s(load, now_s),
            max_chunk_tokens=rows.max_cold_tokens,
            start_position=request.num_computed_tokens,
            max_assisted_tokens=max(0, max_assisted_tokens - num_assisted_tokens),
            num_workers=self._num_workers,
            not_by_workers=_layers(load).not_by_workers,
            num_running=num_others,
            priority=self._planner.config.priority,
            co_scheduled=co_scheduled,
            later_co_scheduled=co_scheduled_decodes(self._planner.model, rows),
        )

    def _co_scheduled(self, rows: StepRows, now_s: float | None) -> CoScheduledRows:
        """Return all rows so far. ``now_s``: None = without arrival times of layers."""
        parts = []
        for request, chunk in rows.cold_chunks:
            load = self.transfers.load_of(request.adapter_id)
            assert load is not None, request.request_id
            split_layer = chunk.split_layer
            arrival_s: tuple[float, ...] = ()
            if now_s is not None:
                read_s = self._read_s(load, now_s) or (0.0,) * split_layer
                arrival_s = read_s[:split_layer] + self._ready_s(load, now_s)[split_layer:]
            parts.append(
                ColdPart(chunk.num_tokens, _shape(load), split_layer, arrival_s, request.num_computed_tokens)
            )
        return co_scheduled_rows(self._planner.model, rows, parts)

    def _ready_s(self, load: OpenLoad, now_s: float) -> tuple[float, ...]:
        """Return by layer the seconds until it is on the device."""
        return self._on_device_s(load, self._link.ready_s(load, now_s), now_s)

    def _on_device_s(self, load: OpenLoad, by_group: Sequence[float], now_s: float) -> tuple[float, ...]:
        """Return the same from the seconds over the link by layer group, if all were on the host."""
        if load.is_from_files:
            link = self._planner.model.link
            copy_s = [link.latency_s + size / link.bytes_per_s for size in load.part_bytes]
            by_group = ready_s(by_group, self._files.read_s(load, now_s), copy_s)
        return by_layer(_layers(load).group_of_layer, by_group)

    def _read_s(self, load: OpenLoad, now_s: float) -> tuple[float, ...] | None:
        """Return by layer the seconds until it is on the host; None without files to read."""
        if not load.is_from_files:
            return None
        return by_layer(_layers(load).group_of_layer, self._files.read_s(load, now_s))


def _layers(load: OpenLoad) -> AdapterLayers:
    layers = load.adapter.layers
    assert layers is not None, f"no plan may use adapter {load.command.adapter_id}"
    return layers


def _shape(load: OpenLoad) -> AdapterShape:
    return AdapterShape(load.adapter.num_bytes, _layers(load).rank_sums)
