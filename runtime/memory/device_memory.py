"""Device memory: KV blocks, adapters and loads.

One object counts all memory: free, about to be free, and evictable. Pure account keeping: loads and
evictions are commands for an executor. One plan both frees and allocates memory, so evicted memory
is free here as soon as the eviction is decided.
"""

from collections.abc import Sequence

from ..adapter import AdapterFacts
from ..plan import BASE_ADAPTER, AdapterId, StepPlan, TransferResult
from ..request import Request
from .adapter_cache import AdapterCache, AdapterState
from .adapter_log import EvictionReason
from .block_pool import BlockPool
from .grant import Grant, MemoryCommands, Need, Verdict
from .host_budget import HostBudget, HostSections
from .host_cache import HostCache
from .kv_tree import KvNode, KvTree
from .loads import AdapterLoads, AdapterRegistrations
from .prefix_cache import HostSlots, PrefixCache, TiedKv
from .relief import MemoryRelief
from .reload_cost import PolicyInputs
from .room import Pins, RoomMaker
from .swapper import KvSwapper
from .transfers import OpenCopy, OpenLoad, OpenTransfer, TransferTable
from .watermarks import WatermarkSwaps


class DeviceMemory:
    """The memory budget, with the block pool and the adapter cache that allocate from it."""

    def __init__(
        self,
        pool: BlockPool,
        cache: AdapterCache,
        host: HostCache | None = None,
        tree: KvTree | None = None,
        *,
        transfers: TransferTable | None = None,
        max_history_blocks: int | None = None,
        inputs: PolicyInputs | None = None,
        num_host_slots: int = 0,
    ) -> None:
        """Assemble the memory.

        Args:
            pool: KV blocks.
            cache: Adapters on the device; must allocate from the budget of ``pool``.
            host: Adapters on the host. If the device uses host memory, idle adapters get what
                blocks and used adapters leave of the budget. None = host memory is not planned.
            tree: Stores KV of prefixes, ranked by the policy of ``cache``; None = no KV is kept.
            transfers: Open transfers; None = a new table.
            max_history_blocks: Limit of blocks that no request uses; None = all.
            inputs: Measurements for the policy; None = not measured.
            num_host_slots: KV blocks that fit the host. Above 0 requires a tree and inputs.
        """
        self.budget = pool.budget
        self.capacity_bytes = pool.budget.capacity_bytes
        self.num_blocks, self.block_bytes = pool.num_blocks, pool.block_bytes
        self.keeps_prefixes = tree is not None
        self.adapter_limit_bytes = cache.limit_bytes
        self.pool = pool
        self.cache = cache
        self.host = host
        self.registrations = AdapterRegistrations(pool.budget, host)
        self.pins = Pins(cache, pool)
        self._slots = slots = HostSlots(num_host_slots)
        reuse = None if inputs is None else inputs.kv_reuse
        tree = tree or KvTree(1, pool.block_bytes, cache.policy)  # which stays empty
        self.prefixes = PrefixCache(pool, tree, cache.policy, slots, reuse)
        self.tied_kv = TiedKv(cache, self.prefixes)
        self.transfers = TransferTable() if transfers is None else transfers
        self.room = RoomMaker(pool, cache, self.prefixes, self.pins, self._evict)
        self.host_budget: HostBudget | None = None  # None = adapters and KV have their own memory
        self._inputs = inputs
        self.swapper: KvSwapper | None = None
        if num_host_slots:
            assert self.keeps_prefixes and inputs is not None
            self.swapper = KvSwapper(
                tree, pool, self.prefixes, slots, cache.policy, self.transfers, inputs.costs, self.room
            )
        self.loads = AdapterLoads(pool, cache, self.pins, self.room, self.transfers, host)
        self.relief = MemoryRelief(pool, cache, self.room, host)
        keeps_history = cache.policy.rules.keeps_history
        self._max_history_blocks = max_history_blocks if keeps_history else 0
        self.swaps = self._make_swaps()
        self._evictions: list[AdapterId] = []  # not yet in a plan
        self._asked_evictions: list[AdapterId] = []  # of idle adapters, for the next plan
        self._dropped: dict[AdapterId, None] = {}  # evicted once they are idle
        self._removed: list[AdapterId] = []  # dropped and gone, until they are taken

    def share_host(self, sections: HostSections) -> None:
        """Let adapters and KV share the host's memory; before either uses it."""
        assert self.host is not None
        new_id = self.transfers.new_id
        self.host_budget = HostBudget(sections, self.host, self._slots, self.prefixes, new_id)

    @property
    def has_work(self) -> bool:
        """Whether a transfer is open, a dropped adapter is left, or evictions wait for a plan."""
        is_left = self._dropped or self._evictions or self._asked_evictions or len(self.transfers)
        return bool(is_left) or (self.host is not None and self.host.has_evictions)

    @property
    def wake_at_s(self) -> float | None:
        """When the next plan may swap or move something without an event; None = never."""
        parts = (self.swaps, self.host_budget)
        times_s = [None if part is None else part.wake_at_s for part in parts]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    @property
    def num_used_blocks(self) -> int:
        """KV blocks in use by requests."""
        return self.pool.num_used_blocks

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are free or evictable."""
        return min(self.pool.num_unused_blocks, self.budget.reservable_bytes // self.block_bytes)

    @property
    def num_reserved_blocks(self) -> int:
        """KV blocks that are free or evictable, and reserved for growth."""
        return self.pool.num_reserved_blocks

    def can_ever_hold(
        self,
        num_blocks: int,
        adapter_bytes: int,
        adapter_id: AdapterId = BASE_ADAPTER,
        run_pages: Sequence[int] = (),
    ) -> bool:
        """Whether a request of this size fits the device alone, beside pinned adapters."""
        pinned_bytes, limit_bytes = self.pins.num_bytes(without=adapter_id), self.adapter_limit_bytes
        if limit_bytes is not None and adapter_bytes + pinned_bytes > limit_bytes:
            return False
        pages = self.pool.pages
        if pages is not None and not pages.could_hold(run_pages):
            return False
        needed_bytes = num_blocks * self.block_bytes + adapter_bytes + pinned_bytes
        return num_blocks <= self.num_blocks and needed_bytes <= self.capacity_bytes

    def adapter_state(self, adapter_id: AdapterId) -> AdapterState:
        return self.cache.state(adapter_id)

    def find(self, request: Request) -> Sequence[KvNode]:
        """Return the blocks with KV of the request's known tokens, on the device or the host.

        The last token is always computed, so no request writes to a block that others may read. A
        request with a scored prompt computes all of it.
        """
        if request.sampling.prompt_logprobs is not None:
            return ()
        return self.prefixes.match(
            request.kv_namespace, request.known_token_ids, request.num_known_tokens - 1
        )

    def admit(self, need: Need, now_s: float) -> Grant | Verdict:
        """Give a request all the memory that it needs in order to run, or say what it lacks.

        Loads its adapter, copies its KV back from the host, evicts what is idle, and reserves the
        predicted growth of all running requests.
        """
        request, pool = need.request, self.pool
        verdict = self._ready_adapter(need, now_s)
        if verdict is Verdict.NO_ADAPTER or (verdict and self.swapper is None):
            return verdict
        path = self.find(request)
        if self.swapper is not None:
            num_found = self.swapper.num_readable(path)
            if num_found < len(path):
                coming = self.swapper.swap_in(need, path, num_found, now_s)
                verdict = verdict or coming
            path = path[:num_found]
        if verdict is not None:
            return verdict
        num_blocks = need.kv_bytes // self.block_bytes - len(path)
        num_to_come = self.room.blocks_to_come(need, path, num_blocks)
        if num_to_come is None:
            return Verdict.NO_KV
        self.prefixes.hold(path)
        # Renew the reservation: it may contain blocks of ended requests, or of the held path.
        num_reserved = max(0, num_to_come - num_blocks)
        pool.reserve_growth(num_reserved)
        if pool.num_available_blocks < num_blocks:
            self.room.reclaim_for(need, num_blocks)
            if pool.num_available_blocks < num_blocks:  # some are still draining
                self.prefixes.release(path)
                return Verdict.NO_KV
        grant = self._grant(request, path, num_blocks, now_s)
        pool.reserve_growth(num_reserved)
        return grant

    def grow(self, grant: Grant, num_blocks: int) -> bool:
        """Allocate further blocks, reserved ones first. Return whether so many were free."""
        block_ids = self.pool.allocate(num_blocks)
        if block_ids is None:
            return False
        grant.block_ids.extend(block_ids)
        return True

    def reclaim_growth(self, num_blocks: int) -> bool:
        """Evict until running requests can grow by ``num_blocks``. See ``RoomMaker.reclaim``."""
        return self.room.reclaim(num_blocks, 0, include_waiting=True, keep=BASE_ADAPTER)

    def store(self, grant: Grant, namespace: bytes, token_ids: tuple[int, ...], now_s: float) -> None:
        """Store the next computed whole block of a request in the tree, for other requests."""
        path = grant.path
        node = self.prefixes.store(
            grant.adapter_id,
            namespace,
            path[-1] if path else None,
            token_ids,
            grant.block_ids[len(path)],
            now_s,
        )
        path.append(node)

    def retire(self, grant: Grant) -> None:
        """Announce that a grant will be released when the steps in flight have ended."""
        grant.num_retired_blocks = self.room.retire(grant.path, grant.own_block_ids())

    def release(self, grant: Grant) -> None:
        """Free the blocks of a grant that are its own, and end its holds on all else."""
        self.room.num_draining_blocks -= grant.num_retired_blocks
        self.pool.free(grant.own_block_ids())
        self.prefixes.release(grant.path)
        grant.block_ids.clear()
        self.cache.release(grant.adapter_id)

    def know(self, adapter_id: AdapterId, adapter: AdapterFacts) -> None:
        """Allow loads of a version while memory is idle, before a request names it."""
        self.loads.known[adapter_id] = adapter

    def drop_content(self, digest: str) -> None:
        """Drop from the host a content that no adapter version has any more."""
        if self.host is not None:
            self.host.drop(digest)

    def drop(self, adapter_id: AdapterId) -> None:
        """Remove an adapter version for ever, as soon as nothing on the device refers to it."""
        assert adapter_id != BASE_ADAPTER
        self._dropped[adapter_id] = None
        self.pins.unpin(adapter_id)

    def evict(self, adapter_id: AdapterId) -> bool:
        """Evict an adapter with the next plan if it is idle. Return whether it is idle now.

        A later request may load it again. Its memory is not free before the next plan, because a
        step in flight may still read the adapter.
        """
        is_idle = self.cache.is_idle(adapter_id)
        if is_idle:
            self._asked_evictions.append(adapter_id)
        return is_idle

    def take_removed(self) -> list[AdapterId]:
        """Return the dropped adapters that were removed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def begin_plan(self, num_running: int, now_s: float) -> None:
        """Begin the next plan with the evictions of ``evict``, ``drop`` and limits.

        KV of ended requests beyond its limit is evicted before admission, so no request finds it.
        """
        if self._inputs is not None:
            self._inputs.batch_size.record(num_running, now_s)
        if self.host is not None:
            self.host.is_short = False
        self.tied_kv.count(now_s)
        asked, self._asked_evictions = self._asked_evictions, []
        for adapter_id in (*self._dropped, *asked):
            if self.cache.is_idle(adapter_id):
                is_dropped = adapter_id in self._dropped
                self.loads.known.pop(adapter_id, None)  # until a request names it
                reason = EvictionReason.DROPPED if is_dropped else EvictionReason.ASKED
                self._evict(adapter_id, reason)
        if self._max_history_blocks is not None:
            num_blocks = self.prefixes.num_evictable_blocks - self._max_history_blocks
            self.room.free_up(0, num_blocks, include_waiting=False, keep=BASE_ADAPTER)
        self.relief.apply_limit(now_s)
        for adapter_id in tuple(self._dropped):
            if self.cache.state(adapter_id) is AdapterState.ABSENT:
                del self._dropped[adapter_id]
                self.tied_kv.discard(adapter_id)
                self.prefixes.drop_version(adapter_id)
                self.cache.discard(adapter_id)
                self.loads.known.pop(adapter_id, None)
                self._removed.append(adapter_id)

    def commands(self, now_s: float) -> MemoryCommands:
        """Return all that the next plan does with memory. The order matters.

        Copies of KV run ahead of evictions. Evicted KV frees blocks, and freed blocks leave room on
        the host if the device uses the host's memory.
        """
        if self.swapper is not None:
            self.swapper.copy_ahead(self._max_history_blocks, now_s)
        self.tied_kv.evict_pending()
        if self.swaps is not None:  # after evictions, which may leave memory idle
            self.swaps.turn(now_s, may_bring=not self.relief.is_active)
        has_loads = self.transfers.num_loads_to_begin > 0
        for adapter_id in self.cache.unwanted_ids():
            self._evict(adapter_id, EvictionReason.UNUSED)
        evictions, self._evictions = tuple(self._evictions), []
        host_move = None if self.host_budget is None else self.host_budget.take_command(now_s)
        return MemoryCommands(
            evict_adapters=evictions,
            freed_blocks=self.relief.take_freed_blocks(is_needed=has_loads),
            transfers=self.transfers.take_commands(),
            promoted_transfers=self.transfers.take_promoted(),
            load_order=self.transfers.take_order(),
            host_evictions=self.relief.take_host_evictions(),
            host_move=host_move,
        )

    def repeat(self, plan: StepPlan) -> None:
        """Repeat in the next plan what a lost one did with memory, except its transfers."""
        absent = AdapterState.ABSENT
        self._evictions += [one for one in plan.evict_adapters if self.cache.state(one) is absent]
        self.pool.rewarm(plan.freed_blocks)
        if self.host is not None:
            self.host.evict_again(plan.host_evictions)
        if self.host_budget is not None:
            self.host_budget.repeat()
        self.transfers.repeat(plan.promoted_transfers)

    def end_transfer(self, result: TransferResult, now_s: float) -> OpenTransfer | None:
        """Apply the end of a transfer and return it; None if it is unknown or has ended."""
        has_failed = result.error is not None
        transfer = self.transfers.end(result.transfer_id, now_s, has_failed=has_failed)
        if isinstance(transfer, OpenLoad):
            self.loads.end(transfer, has_failed=has_failed)
            if has_failed:
                self.tied_kv.load_failed(transfer.command.adapter_id)
            else:
                self.cache.log.loaded(transfer, now_s)
            if self._inputs is not None and transfer.is_demand and not has_failed:
                duration_s = now_s - transfer.began_s
                self._inputs.costs.load_ended(transfer.command.num_bytes, duration_s)
        elif isinstance(transfer, OpenCopy):
            assert self.swapper is not None
            self.swapper.end(transfer, has_failed=has_failed)
        elif self.host_budget is not None:
            self.host_budget.end(result, now_s)
        return transfer

    def _make_swaps(self) -> WatermarkSwaps | None:
        """Return the swaps of a policy with watermarks. Host memory needs none where it is read."""
        is_in_place = self.host is not None and self.host.is_device_memory
        if self.cache.policy.rules.watermarks is None or is_in_place:
            return None
        return WatermarkSwaps(
            self.pool,
            self.cache,
            self.prefixes,
            self.room,
            self.loads,
            self.transfers,
            self.swapper,
            self._max_history_blocks,
        )

    def _ready_adapter(self, need: Need, now_s: float) -> Verdict | None:
        """Return None if the request can run now; otherwise load its adapter if there is room."""
        adapter_id = need.request.adapter_id
        state = self.cache.state(adapter_id)
        if state is AdapterState.RESIDENT:
            return None
        if state is AdapterState.LOADING:
            self.transfers.promote(adapter_id, now_s)
        elif not self.loads.begin_for(need, now_s):
            return Verdict.NO_ADAPTER
        return None if need.may_start_cold() else Verdict.LOADING

    def _grant(self, request: Request, path: Sequence[KvNode], num_blocks: int, now_s: float) -> Grant:
        """Allocate free blocks for a request that begins to run with the held blocks of a path."""
        grant = Grant(request.adapter_id, [], list(path))
        for node in path:
            assert node.block_id is not None, "its block is not on the device"
            grant.block_ids.append(node.block_id)
        has_grown = self.grow(grant, num_blocks)
        assert has_grown, num_blocks
        self.cache.acquire(request.adapter_id, now_s)
        self.prefixes.visit(request.adapter_id, request.kv_namespace, path, now_s)
        return grant

    def _evict(self, adapter_id: AdapterId, reason: EvictionReason) -> None:
        """Evict an idle adapter with the next plan."""
        self.cache.evict(adapter_id, reason)
        self._evictions.append(adapter_id)
        self.tied_kv.adapter_left(adapter_id)
        self.loads.evicted(adapter_id)
