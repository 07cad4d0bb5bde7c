"""Admits waiting requests as far as the device has room, and loads adapters."""

from collections.abc import Sequence

from ..adapter import AdapterFacts
from ..memory.adapter_cache import AdapterState
from ..memory.device_memory import DeviceMemory
from ..memory.kv_tree import KvNode
from ..plan import BASE_ADAPTER, AdapterId
from ..request import Request
from .cold import ColdStarts
from .config import SchedulerConfig
from .events import SchedulerCounters, TimePart
from .forecast import ArrivalForecast
from .limits import blocks_for
from .policy import NO_ROOM, PolicyWithQueues, SchedulerPolicy, Verdict
from .running_set import RunningSet
from .step_draft import StepDraft
from .waiting_work import WaitingWork

_MAX_SWAP_INS = 2  # copies of KV from the host for a waiting request; then it computes the KV


class Admission:
    """Admits the candidates of a policy for which the device has room."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: SchedulerPolicy,
        memory: DeviceMemory,
        running: RunningSet,
        cold_starts: ColdStarts,
        counters: SchedulerCounters,
        forecast: ArrivalForecast | None = None,
    ) -> None:
        """All parts belong to the scheduler. ``forecast``: None = load for known requests only."""
        self._config = config
        self._policy = policy
        self._queues = policy if isinstance(policy, PolicyWithQueues) else None
        self._memory = memory
        self._running = running
        self._cold_starts = cold_starts
        self._forecast = forecast
        self._counters = counters
        self.waiting = WaitingWork()
        self._headroom_blocks = round(config.growth_headroom * memory.pool.num_blocks)

    def admit(self, draft: StepDraft, now_s: float) -> None:
        """Admit until no slot is left or the policy stops. Put rows into ``draft`` if it has room.

        Pinned adapters load first: otherwise waiting requests would take all memory that becomes
        free. Prefetches come last, and only if no request lacked memory.
        """
        self._load_pinned(now_s)
        verdict = Verdict.ADMITTED
        if len(self._policy):
            verdict = self._admit(draft, now_s)
        if verdict not in NO_ROOM:
            self._prefetch(now_s)

    def _admit(self, draft: StepDraft, now_s: float) -> Verdict:
        """Offer memory to the policy's candidates. Return the verdict on the last one."""
        candidates = self._policy.candidates(now_s)
        request = next(candidates, None)
        is_first, verdict = True, Verdict.ADMITTED
        while request is not None and self._has_slot():
            verdict = self._try(request, draft, now_s, is_first=is_first)
            is_first = False
            if verdict is not Verdict.ADMITTED:
                self._record_wait(request, self._wait_reason(request, verdict), now_s)
            try:
                request = candidates.send(verdict)
            except StopIteration:
                request = None
        candidates.close()
        for request in () if self._queues is None else self._queues.lacking_quota():
            self._record_wait(request, TimePart.QUEUE_QUOTA, now_s)
        return verdict

    def _record_wait(self, request: Request, part: TimePart, now_s: float) -> None:
        self._running.timelines.waits(request, part, len(self._running), now_s)

    def _wait_reason(self, request: Request, verdict: Verdict) -> TimePart:
        """Return what a refused request waits for."""
        if verdict is Verdict.NO_KV:
            return TimePart.KV_MEMORY
        if verdict is Verdict.NO_ADAPTER:
            return TimePart.ADAPTER_MEMORY
        load = self._memory.transfers.load_of(request.adapter_id)
        if load is None:
            return TimePart.KV_SWAP_IN
        return TimePart.ADAPTER_LOAD if load.is_on_host else TimePart.DISK_READ

    def arrived(self, request: Request, now_s: float) -> None:
        """Record a new request, which begins to wait."""
        self._running.timelines.arrived(request, now_s)
        request.num_known_prefix_tokens = len(self._match(request)) * self._config.block_size
        if self._forecast is not None:
            state = self._memory.cache.state(request.adapter_id)
            self._forecast.arrived(
                request, now_s, is_on_device=state is not AdapterState.ABSENT
            )  # fmt: skip

    def _has_slot(self) -> bool:
        """Whether one more request may run.

        It may run even if the step is full: an admitted request takes part in the order of prefill,
        in which a short prompt goes before the rest of a long one.
        """
        return len(self._running) < self._config.max_num_seqs

    def _try(self, request: Request, draft: StepDraft, now_s: float, *, is_first: bool) -> Verdict:
        """Admit ``request`` if its adapter is ready and the predicted growth of all requests fits.

        The growth is reserved. Only the first candidate may displace adapters that other waiting
        requests name. Otherwise two requests could displace each other's adapter for ever.
        """
        if request.num_in_flight_steps:
            return Verdict.NO_KV  # preempted just now; a step in flight still uses its memory
        verdict = self._ready_adapter(request, draft, now_s, is_first=is_first)
        if verdict is Verdict.NO_ADAPTER or (verdict and self._memory.swapper is None):
            return verdict
        path = self._match(request)
        if self._memory.swapper is not None:
            num_found = self._memory.swapper.num_readable(path)
            if num_found < len(path):
                coming = self._swap_in(request, path, num_found, now_s, include_waiting=is_first)
                verdict = verdict or coming
            path = path[:num_found]
        if verdict is not None:
            return verdict
        num_blocks = blocks_for(request.num_known_tokens, self._config.block_size) - len(path)
        num_to_come = self._running.num_growth_blocks(request, len(path))
        if not self._has_room(request, path, num_blocks, num_to_come):
            return Verdict.NO_KV
        memory = self._memory
        memory.prefixes.hold(path)
        # Renew the reservation: it may contain blocks of ended requests, or of the held path.
        memory.pool.reserve_growth(max(0, num_to_come - num_blocks))
        if memory.pool.num_available_blocks < num_blocks:
            memory.reclaim(num_blocks, 0, include_waiting=is_first, keep=request.adapter_id)
            if memory.pool.num_available_blocks < num_blocks:  # some are still draining
                memory.prefixes.release(path)
                return Verdict.NO_KV
        self._start(request, path, num_blocks, draft, now_s)
        memory.pool.reserve_growth(max(0, num_to_come - num_blocks))
        return Verdict.ADMITTED

    def _swap_in(
        self, request: Request, path: Sequence[KvNode], num_found: int, now_s: float,
        *, include_waiting: bool,
    ) -> Verdict | None:  # fmt: skip
        """Copy the blocks of ``path`` that only the host has; None = the request computes them.

        The request does not hold the copied blocks, so other requests may evict them before it
        runs. After two copies it computes what is missing.
        """
        memory, swapper, size = self._memory, self._memory.swapper, self._config.block_size
        assert swapper is not None
        if swapper.is_coming(path[num_found]):  # maybe for another request
            request.coming_tokens = range(num_found * size, len(path) * size)
            return Verdict.LOADING
        nodes = path[num_found:]
        if request.num_swap_ins == _MAX_SWAP_INS or not swapper.is_copy_faster(nodes):
            return None
        num_blocks = blocks_for(request.num_known_tokens, size) - num_found
        num_to_come = self._running.num_growth_blocks(request, num_found)
        if not self._has_room(request, path[:num_found], num_blocks, num_to_come):
            return Verdict.NO_KV
        memory.prefixes.hold(path)
        self._running.reserve_growth()
        if memory.pool.num_available_blocks < len(nodes):
            memory.reclaim(len(nodes), 0, include_waiting=include_waiting, keep=request.adapter_id)
        block_ids = memory.pool.allocate(len(nodes))
        if block_ids is None:
            memory.prefixes.release(path)
            return Verdict.NO_KV
        swapper.copy_in(nodes, block_ids, now_s)
        self._running.reserve_growth()
        request.num_swap_ins += 1
        request.coming_tokens = range(num_found * size, len(path) * size)
        return Verdict.LOADING

    def _match(self, request: Request) -> Sequence[KvNode]:
        """Return the blocks with KV of the request's known tokens.

        The last token is always computed, so no request writes to a block that others may read. A
        request with a scored prompt computes all of it.
        """
        threshold = self._config.recompute_at_tokens
        request.has_short_kv = threshold is not None and request.num_known_tokens < threshold
        if request.sampling.prompt_logprobs is not None:
            return ()
        return self._memory.prefixes.match(
            request.kv_namespace, request.known_token_ids, request.num_known_tokens - 1
        )

    def _has_room(
        self, request: Request, path: Sequence[KvNode], num_blocks: int, num_to_come: int
    ) -> bool:
        """Whether memory has room for ``request`` and for the growth of all running requests.

        If no request is running, ``num_blocks`` for the known tokens are enough: nothing competes
        for its growth.
        """
        if len(self._running):
            num_blocks = num_to_come + self._headroom_blocks
        return self._memory.has_room_for(request.adapter_id, num_blocks, path)

    def _ready_adapter(
        self, request: Request, draft: StepDraft, now_s: float, *, is_first: bool
    ) -> Verdict | None:
        """Return None if the request can run now; otherwise load its adapter if there is room."""
        state = self._memory.cache.state(request.adapter_id)
        if state is AdapterState.RESIDENT:
            return None
        if state is AdapterState.LOADING:
            self._memory.transfers.promote(request.adapter_id, now_s)
        elif not self._make_room_and_load(request, now_s, include_waiting=is_first):
            return Verdict.NO_ADAPTER
        may_start = draft.max_cold_tokens > 0 and self._cold_starts.may_start(
            request, len(self._running), draft.rows, now_s
        )
        return None if may_start else Verdict.LOADING

    def _make_room_and_load(self, request: Request, now_s: float, *, include_waiting: bool) -> bool:
        """Start the load of a request's adapter, with evictions on the device, then on the host.

        Evict only if the load can then start: a plan that contains nothing but evictions may never
        be issued. Return whether the load has started.
        """
        assert request.adapter is not None, request.request_id
        for _ in range(2):
            if self._load(request, now_s):
                return True
            if not self._memory.reclaim_load(request.adapter, include_waiting=include_waiting):
                return False
        return self._load(request, now_s)

    def _load(self, request: Request, now_s: float) -> bool:
        """Start the load of a request's adapter if it fits now. Return whether it did."""
        assert request.adapter is not None, request.request_id
        self._running.reserve_growth()  # the load must not take it
        return self._memory.load(request.adapter_id, request.adapter, now_s) is not None

    def _start(
        self, request: Request, path: Sequence[KvNode], num_blocks: int, draft: StepDraft,
        now_s: float,
    ) -> None:  # fmt: skip
        """Run ``request`` from this step on."""
        block_ids = self._memory.pool.allocate(num_blocks)
        assert block_ids is not None
        self._memory.cache.remove_waiting(request.adapter_id)
        self.waiting.remove(request)
        self._running.start(request, path, block_ids, now_s)
        self._memory.prefixes.visit(request.adapter_id, request.kv_namespace, path, now_s)
        num_found, num_copied = request.found(len(path) * self._config.block_size)
        self._counters.prompt_tokens_cached += num_found
        self._counters.prompt_tokens_host_cached += num_copied
        request.is_cold = self._memory.cache.state(request.adapter_id) is AdapterState.LOADING
        draft.announce(request)
        draft.append_blocks(request, 0)
        if not request.is_cold:
            if draft.num_free_tokens:
                draft.add_chunk(request)
            return
        max_tokens = draft.cold_tokens_in_time(request)
        if not max_tokens:
            return
        chunk = self._cold_starts.next_chunk(
            request, max_tokens, len(self._running) - 1, draft.rows, now_s
        )
        if chunk is not None:
            draft.add_cold_chunk(request, chunk)

    def _load_pinned(self, now_s: float) -> None:
        # As demand loads: a prefetch waits until no request waits for a load, perhaps for ever.
        for adapter_id, adapter in self._memory.pins.to_load():
            if not self._load_ahead(adapter_id, adapter, now_s, is_demand=True):
                return

    def _prefetch(self, now_s: float) -> None:
        """Load adapters of requests that wait for a slot, and of requests that are expected."""
        for request in self._policy.upcoming(self._config.max_prefetch_requests):
            if not self._load_ahead(request.adapter_id, request.adapter, now_s):
                return
        if self._forecast is None:
            return
        for adapter_id, adapter in self._forecast.expected(now_s):
            if self._memory.cache.state(adapter_id) is not AdapterState.ABSENT:
                continue
            if not self._load_ahead(adapter_id, adapter, now_s):
                return
            if self._memory.cache.state(adapter_id) is AdapterState.LOADING:
                self._forecast.loads(adapter_id, adapter.num_bytes)

    def _load_ahead(
        self, adapter_id: AdapterId, adapter: AdapterFacts | None, now_s: float,
        *, is_demand: bool = False,
    ) -> bool:  # fmt: skip
        """Load an absent adapter without using reserved memory. False if there is no room."""
        memory = self._memory
        if memory.cache.state(adapter_id) is not AdapterState.ABSENT:
            return True
        assert adapter is not None, adapter_id
        reserve_bytes = self._headroom_blocks * memory.pool.block_bytes
        if memory.cache.slab is not None:
            reserve_bytes = 0  # adapters do not compete with blocks
        needed_bytes = adapter.num_bytes + reserve_bytes
        self._running.reserve_growth()
        if not memory.has_adapter_room(needed_bytes):
            memory.reclaim(0, needed_bytes, include_waiting=False, keep=BASE_ADAPTER)
            if not memory.has_adapter_room(needed_bytes):
                return False
        memory.load(adapter_id, adapter, now_s, is_demand=is_demand)
        return True
