"""Cold starts as the scheduler asks for them: keeps loads and decisions, plans chunk by chunk.

Joins the planner, which knows times, with the ledger of the link, which knows what is under way.
Pure: times come in as arguments.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..engine.request import Request
from ..plan import AdapterId, RequestId
from ..scheduler.cold import ColdChunk
from ..scheduler.events import ColdStart
from .cold import AdapterShape, ColdRequest, warm_s
from .link import LinkLedger, by_layer
from .planner import Planner
from .predict import split_chunk
from .split import Split
from .strategy import Decision, LoadStrategy

_MIN_CHUNK_TOKENS = 16
_AT_ONCE = (LoadStrategy.PIPELINED, LoadStrategy.ASSISTED)  # the load need not have ended


@dataclass(frozen=True, slots=True)
class AdapterLayers:
    """An adapter as its load sees it."""

    shape: AdapterShape
    group_bytes: tuple[int, ...]  # by layer group, in the order of loading
    group_of_layer: tuple[int, ...]
    is_on_host: bool  # its layer groups can move at once; else files must be read first


@dataclass(slots=True)
class _Start:
    decision: Decision
    decided_at_s: float


class PlannedColdStarts:
    """See ``scheduler.cold.ColdStarts``. Requests of unknown or failed loads wait."""

    def __init__(
        self,
        planner: Planner,
        layers_of: Callable[[AdapterId], AdapterLayers],
        *,
        num_free_workers: Callable[[], int],
        running_step_s: Callable[[], float],
        max_chunk_tokens: int,
    ) -> None:
        """Make plans without any load under way.

        Args:
            planner: Chooses strategies; its model is what chunks are predicted with.
            layers_of: Looks an adapter version up.
            num_free_workers: Workers that are alive now.
            running_step_s: Length of a usual step of the running requests.
            max_chunk_tokens: Of cold requests, in one step.
        """
        self._planner = planner
        self._layers_of = layers_of
        self._num_free_workers = num_free_workers
        self._running_step_s = running_step_s
        self._max_chunk_tokens = max_chunk_tokens
        self._ledger = LinkLedger(planner.model.link)
        self._loading: dict[AdapterId, AdapterLayers] = {}
        self._starts: dict[RequestId, _Start] = {}
        self._blocking: set[AdapterId] = set()
        self._counts: Counter[str] = Counter()

    def use(self, planner: Planner) -> None:
        """Ask another planner from now on. No load may be under way."""
        assert not self._loading, "the link's ledger is of the planner before"
        self._planner = planner
        self._ledger = LinkLedger(planner.model.link)

    def load_started(self, adapter_id: AdapterId, now_s: float, *, is_demand: bool) -> None:
        """A load has been commanded."""
        layers = self._layers_of(adapter_id)
        self._loading[adapter_id] = layers
        self._ledger.start(adapter_id, layers.group_bytes, now_s, is_demand=is_demand)

    def load_promoted(self, adapter_id: AdapterId, now_s: float) -> None:
        """A request waits for what was a prefetch."""
        if adapter_id in self._loading:
            self._ledger.promote(adapter_id, now_s)

    def load_progressed(self, adapter_id: AdapterId, num_groups: int, now_s: float) -> None:
        """So many layer groups have arrived."""
        self._ledger.report(adapter_id, num_groups, now_s)

    def load_ended(self, adapter_id: AdapterId, now_s: float) -> None:
        """The load has ended, well or badly."""
        self._loading.pop(adapter_id, None)
        self._blocking.discard(adapter_id)
        self._ledger.end(adapter_id, now_s)

    def may_start(self, request: Request, num_running: int, now_s: float) -> bool:
        """Decide once for a request whose adapter is loading; then keep to it."""
        layers = self._loading.get(request.adapter_id)
        if layers is None or request.retried_positions:
            return False
        start = self._starts.get(request.request_id)
        if start is None:
            start = _Start(self._decide(request, layers, num_running, now_s), now_s)
            self._starts[request.request_id] = start
            self._counts[start.decision.strategy.value] += 1
            if start.decision.strategy is LoadStrategy.BLOCKING:
                self._blocking.add(request.adapter_id)
        return start.decision.strategy in _AT_ONCE

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, now_s: float
    ) -> ColdChunk | None:
        """As many tokens as hold the others up no longer than the configured share.

        None while the request would only wait for its load: the next layer group, or the end of
        the load, lets the scheduler ask again.
        """
        layers = self._loading.get(request.adapter_id)
        if layers is None:
            return None  # the load has failed, and the request is about to be told
        if request.retried_positions[request.num_computed_tokens] > 1:
            return None  # not even what has arrived was of use, so it needs the whole adapter
        strategy = self._strategy_of(request)
        cold = self._cold_request(request, layers, num_others, now_s)
        num_tokens = min(request.num_pending_tokens, max_tokens, self._max_chunk_tokens)
        while True:
            split = split_chunk(self._planner.model, cold, num_tokens, strategy)
            if not num_others or self._is_bearable(cold, num_tokens, split):
                return ColdChunk(num_tokens, split.layer)
            if num_tokens <= _MIN_CHUNK_TOKENS:
                return None
            num_tokens = max(_MIN_CHUNK_TOKENS, num_tokens // 2)

    def stops_everybody(self) -> bool:
        """Whether a blocking load is under way."""
        return bool(self._blocking)

    def decision(self, request_id: RequestId) -> Decision | None:
        """What was decided for a request that has not ended, if it came cold."""
        start = self._starts.get(request_id)
        return None if start is None else start.decision

    def first_token(self, request_id: RequestId, now_s: float) -> ColdStart | None:
        """Compare with what was predicted."""
        start = self._starts.get(request_id)
        if start is None:
            return None
        decision = start.decision
        if decision.predictions:
            predicted = decision.predictions[0]
            measured_s = now_s - start.decided_at_s
            self._planner.observe(predicted.strategy, predicted.first_token_s, measured_s)
        return ColdStart(decision.strategy.value, decision.reason)

    def counts(self) -> Mapping[str, int]:
        """Requests that came cold, by strategy."""
        return self._counts

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._starts.pop(request_id, None)

    def _decide(
        self, request: Request, layers: AdapterLayers, num_others: int, now_s: float
    ) -> Decision:
        """Ask the planner, whose predictions hold for adapters in the host's memory only."""
        decision = self._planner.decide(self._cold_request(request, layers, num_others, now_s))
        if layers.is_on_host or decision.strategy not in _AT_ONCE:
            return decision
        reason = f"its files must be read first; otherwise {decision.reason}"
        return Decision(LoadStrategy.ASYNC_LOAD, reason)

    def _strategy_of(self, request: Request) -> LoadStrategy:
        """A row that failed once is computed without workers."""
        if request.retried_positions:
            return LoadStrategy.PIPELINED
        return self._starts[request.request_id].decision.strategy

    def _cold_request(
        self, request: Request, layers: AdapterLayers, num_others: int, now_s: float
    ) -> ColdRequest:
        by_group = self._ledger.ready_s(request.adapter_id, now_s)
        return ColdRequest(
            num_tokens=max(1, request.num_pending_tokens),
            adapter=layers.shape,
            ready_s=by_layer(layers.group_of_layer, by_group),
            max_chunk_tokens=self._max_chunk_tokens,
            num_running=num_others,
            running_step_s=self._running_step_s() if num_others else 0.0,
            num_workers=self._num_free_workers(),
        )

    def _is_bearable(self, cold: ColdRequest, num_tokens: int, split: Split) -> bool:
        """Whether the others wait no longer than their share of what they wait for anyway."""
        chunk_s = warm_s(self._planner.model, cold.adapter, num_tokens)
        step_s = chunk_s + cold.running_step_s
        return split.end_s - chunk_s <= self._planner.config.max_stall_share * step_s
