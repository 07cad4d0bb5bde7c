"""Checks that the accounts of memory, scheduler, policies and registry agree with each other.

Only here do tests read the private state of parts.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import singledispatch
from typing import Any

from corun.profiles.link import Direction
from corun.runtime.adapters.registry import AdapterRegistry
from corun.runtime.memory.adapter_cache import AdapterCache, AdapterState
from corun.runtime.memory.block_pool import BlockPool, MemoryBudget
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.grant import Grant
from corun.runtime.memory.host_budget import HostBudget
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.memory.kv_tree import KvNode, KvTree
from corun.runtime.memory.loads import AdapterLoads
from corun.runtime.memory.pages import Pages
from corun.runtime.memory.prefix_cache import HostSlots, PrefixCache, TiedKv
from corun.runtime.memory.room import Pins
from corun.runtime.memory.swapper import KvSwapper
from corun.runtime.memory.transfers import OpenCopy, OpenLoad, TransferTable
from corun.runtime.plan import BASE_ADAPTER, BlockId, RequestId
from corun.runtime.request import Request, RequestStatus
from corun.runtime.scheduler.papers.chameleon.holdings import Holdings
from corun.runtime.scheduler.papers.chameleon.policy import ChameleonPolicy
from corun.runtime.scheduler.papers.chameleon.quotas import QuotaLedger
from corun.runtime.scheduler.running_set import RunningSet
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.timeline import Timelines
from corun.runtime.scheduler.waiting_queue import WaitingWork
from corun.shm.arena_ranges import RangeAllocator


@singledispatch
def check_invariants(part: object) -> None:
    """Assert that a part agrees with itself and with its own parts."""
    raise TypeError(f"no check of {type(part).__name__}")


@check_invariants.register
def _check_budget(budget: MemoryBudget) -> None:
    """Assert that the account adds up."""
    assert all(held >= 0 for held in budget._allocated.values()), budget._allocated
    total = budget.free_bytes + sum(budget._allocated.values())
    assert total == budget.capacity_bytes, (total, budget.capacity_bytes)
    assert budget.free_bytes >= 0, budget.free_bytes
    assert 0 <= budget._reserved_bytes <= budget.reservable_bytes


@check_invariants.register
def _check_pool(pool: BlockPool) -> None:
    """Assert that each block is in exactly one place and that its bytes are counted."""
    returned = {*pool._warm, *pool._cold}
    assert len(returned) == len(pool._warm) + len(pool._cold), "a block is free twice"
    assert not returned & pool._allocated, "a block is free and allocated"
    if pool.pages is None:
        assert returned | pool._allocated == set(range(pool._num_touched))
    else:
        check_pages(pool.pages, pool._allocated)
        assert num_free_pages(pool.pages) == pool.budget.free_bytes // pool.block_bytes
    assert pool._num_touched <= pool.num_blocks
    assert 0 <= pool.num_reserved_blocks <= pool.num_unused_blocks
    held = pool.budget.allocated_bytes("kv")
    assert held == len(pool._allocated) * pool.block_bytes, held


@check_invariants.register
def _check_cache(cache: AdapterCache) -> None:
    """Assert that states, reference counts and bytes agree."""
    total_bytes = 0
    for adapter_id, entry in cache._entries.items():
        total_bytes += entry.num_bytes
        assert adapter_id == BASE_ADAPTER or cache._copies[adapter_id] is entry
        assert entry.state is not AdapterState.ABSENT, (adapter_id, entry)
        idle = entry.state is AdapterState.RESIDENT and entry.num_references == 0
        idle &= adapter_id not in cache._pinned
        assert idle == (adapter_id in cache._idle), (adapter_id, entry)
        assert not entry.has_failed or entry.num_references, (adapter_id, entry)
    assert total_bytes == cache.used_bytes, (total_bytes, cache.used_bytes)
    assert cache.is_within_limit(0), (total_bytes, cache.limit_bytes)
    assert all(count > 0 for count in cache._num_waiting.values())
    assert cache._idle_bytes == sum(entry.num_bytes for entry in cache._idle.values())


@check_invariants.register
def _check_tree(tree: KvTree) -> None:
    """Assert that links, references, counts and offers to the policy agree."""
    nodes = list(tree._detached)
    for namespace, root in tree._roots.items():
        assert root.children and root.namespace == namespace, namespace
        left, num_blocks, num_copies = list(root.children.values()), 0, 0
        while left:
            node = left.pop()
            assert node.root is root and node not in tree._detached, node
            assert node.block_id is not None or node.host_slot is not None, node
            num_blocks += node.block_id is not None
            num_copies += node.host_slot is not None
            nodes.append(node)
            left.extend(node.children.values())
        counts = (root.num_device_blocks, root.num_host_blocks)
        assert counts == (num_blocks, num_copies), namespace
    _check_links(nodes)
    blocks = [node.block_id for node in nodes if node.block_id is not None]
    slots = [node.host_slot for node in nodes if node.host_slot is not None]
    assert len(set(blocks)) == len(blocks) == tree.num_device_blocks, blocks
    assert len(set(slots)) == len(slots) == tree.num_host_blocks, slots
    assert len(nodes) == tree.num_nodes
    assert {node.block_id: node for node in nodes if node.block_id is not None} == tree.by_block
    free = [n for n in nodes if n.block_id is not None and not n.num_references]
    assert len(free) == tree.num_unreferenced_blocks
    offered = [item for item in tree._policy.victims() if not item.is_adapter]
    assert len(offered) == len(set(offered))
    assert set(offered) == {node for node in nodes if node.is_free_leaf}


def _check_links(nodes: list[KvNode]) -> None:
    """Check links, including those of detached nodes, which still refer to their parents."""
    num_referring = dict.fromkeys(nodes, 0)
    num_with_block = dict.fromkeys(nodes, 0)
    for node in nodes:
        parent = node.parent
        if parent is not None:
            num_referring[parent] += node.num_references > 0
            num_with_block[parent] += node.block_id is not None
            assert node.block_id is None or parent.block_id is not None, node
            assert node.depth == parent.depth + 1, node
        for tokens, child in node.children.items():
            assert child.parent is node and child.tokens == tokens, child
            assert child in num_referring, "a removed node can be found"
    for node in nodes:
        assert node.num_references >= num_referring[node], node
        assert node.num_device_children == num_with_block[node], node
        assert node.root is not None or node.num_references > 0, node


@check_invariants.register
def _check_slots(slots: HostSlots) -> None:
    """Assert that each slot is counted once, and that nodes agree on their slots."""
    free = set(slots._free)
    assert len(free) == len(slots._free), "a slot is free twice"
    assert not free & slots._nodes.keys(), "a slot is free and in use"
    assert slots._nodes.keys() == slots._last_use.keys() and slots._read <= slots._nodes.keys()
    taken = [*free, *slots._nodes, *slots._moving]
    expanded = {slot // slots._slots_per_section for slot in taken}
    assert len(taken) == len(set(taken)) == len(expanded) * slots._slots_per_section, "a slot is lost"
    assert expanded.isdisjoint(slots._whole) and slots.away.isdisjoint(expanded.union(slots._whole))
    for slot, node in slots._nodes.items():
        assert node.host_slot == slot, (slot, node)


@check_invariants.register
def _check_prefixes(prefixes: PrefixCache) -> None:
    """Assert that tree and pool agree."""
    assert prefixes._pool.num_cached_blocks == prefixes.num_evictable_blocks
    check_invariants(prefixes._slots)
    if prefixes._tree is not None:
        check_invariants(prefixes._tree)


@check_invariants.register
def _check_tied_kv(tied_kv: TiedKv) -> None:
    """Assert that all KV without its adapter is recorded."""
    if tied_kv._is_on:
        num_blocks = tied_kv._prefixes.num_blocks_without(
            lambda adapter_id: adapter_id in tied_kv._left or tied_kv._is_on_device(adapter_id)
        )
        assert not num_blocks, "KV is on the device without its adapter"


@check_invariants.register
def _check_swapper(swapper: KvSwapper) -> None:
    """Assert that copies hold their blocks, and that counts agree with copies."""
    copies = [one for one in swapper._transfers if isinstance(one, OpenCopy)]
    for copy in copies:
        for node, block_id in zip(copy.nodes, copy.command.block_ids, strict=True):
            assert node.num_references > 0 and node.block_id == block_id, (copy, node)
    coming = [one.nodes for one in copies if one.direction is Direction.TO_DEVICE]
    leaving = [one.nodes for one in copies if one.direction is Direction.TO_HOST]
    assert {node for nodes in coming for node in nodes} == swapper._coming.keys()
    assert sum(map(len, coming)) == len(swapper._coming), "a block comes twice"
    assert sum(map(len, leaving)) == swapper._num_leaving
    assert sum(one.num_pinned_blocks for one in copies) == swapper._room.num_copied_blocks


def _held_blocks(swapper: KvSwapper) -> set[BlockId]:
    """Return the blocks that copies hold, including those of ancestors."""
    held = set[BlockId]()
    for copy in swapper._transfers:
        for one in copy.nodes if isinstance(copy, OpenCopy) else ():
            node: KvNode | None = one
            while node is not None:
                assert node.block_id is not None, node
                held.add(node.block_id)
                node = node.parent
    return held


@check_invariants.register
def _check_table(table: TransferTable) -> None:
    """Assert that loads by adapter and the current reading agree with open transfers."""
    loads = [one for one in table._open.values() if isinstance(one, OpenLoad)]
    assert list(table._loads.values()) == loads
    for load in loads:
        assert table._loads[load.command.adapter_id] is load
        assert not load.command.is_demand or load.is_demand, load
    unread = [load for load in loads if not load.is_on_host]
    assert (table.reading is None) == (not unread), (table.reading, unread)
    assert table.reading is None or table.reading.load in unread, table.reading


@check_invariants.register
def _check_pins(pins: Pins) -> None:
    """Assert that adapters that are to be loaded are pinned and not on the device."""
    for adapter_id in pins._to_load:
        assert adapter_id in pins._adapters
        assert pins._cache.state(adapter_id) is AdapterState.ABSENT


@check_invariants.register
def _check_loads(loads: AdapterLoads) -> None:
    """Assert that open loads and places that the device reads agree with the cache."""
    for transfer in loads._transfers:
        if isinstance(transfer, OpenLoad):
            state = loads._cache.state(transfer.command.adapter_id)
            assert state is AdapterState.LOADING, transfer
    is_in_place = loads._host is not None and loads._host.is_device_memory
    residents = loads._cache.resident_ids() if is_in_place else ()
    assert set(residents) == loads._read_in_place.keys()


@check_invariants.register
def _check_host(host: HostCache) -> None:
    """Assert that places do not overlap, that bytes add up, and that uses agree."""
    check_invariants(host._ranges)
    for kept in host._kept.values():
        assert host.away.isdisjoint(kept.sections), kept
    end = 0
    for start, size in sorted(part for kept in host._kept.values() for part in kept.extents):
        assert start >= end, "two places overlap"
        end = start + size
    assert sum(kept.num_bytes for kept in host._kept.values()) == host.taken_bytes
    assert not host._kept.keys() & set(host._evictions)
    for kept in host._kept.values():
        is_idle = kept.place_id in host._idle
        assert is_idle == (kept.num_users == 0), kept
        assert kept.is_findable == (host._by_digest.get(kept.digest) is kept), kept
        assert kept.is_findable or not is_idle, kept


@check_invariants.register
def _check_host_budget(host_budget: HostBudget) -> None:
    """Assert that each section has one owner, or moves."""
    num_away = len(host_budget._cache.away) + len(host_budget._slots.away)
    assert num_away == host_budget.sections.num_sections + (host_budget._move is not None), num_away
    assert len(host_budget._cache.away) < host_budget.sections.num_sections


@check_invariants.register
def _check_memory(memory: DeviceMemory) -> None:
    """Assert that all parts agree."""
    check_invariants(memory.budget)
    check_invariants(memory.pool)
    check_invariants(memory.cache)
    check_invariants(memory.pins)
    check_invariants(memory.prefixes)
    assert 0 <= memory.room.num_draining_blocks <= memory.pool.num_used_blocks
    if memory.swapper is not None:
        check_invariants(memory.swapper)
    check_invariants(memory.tied_kv)
    check_invariants(memory.transfers)
    check_invariants(memory.loads)
    if memory.host is not None:
        check_invariants(memory.host)
    if memory.host_budget is not None:
        check_invariants(memory.host_budget)


def check_grants(memory: DeviceMemory, grants: Iterable[Grant]) -> None:
    """Assert that grants and copies hold all blocks in use; ``grants``: all open ones."""
    own, shared = list[BlockId](), set[BlockId | None]()
    for grant in grants:
        own += grant.own_block_ids()
        shared |= {node.block_id for node in grant.path}
    if memory.swapper is not None:
        shared |= _held_blocks(memory.swapper)
    assert len(set(own)) == len(own), "a block has two owners"
    assert not shared.intersection(own), "a block of the tree is a request's own"
    assert len(own) + len(shared) == memory.pool.num_used_blocks


def _check_timelines(timelines: Timelines, requests: Mapping[RequestId, Request]) -> None:
    """Assert that timelines belong to requests that have not ended, and agree on states."""
    for request_id, timeline in timelines._open.items():
        assert requests[request_id] is timeline.request
        is_running = timeline.request.status is RequestStatus.RUNNING
        assert is_running == (request_id in timelines._running), timeline
        assert abs(sum(share for _, share in timeline.shares) - 1) < 1e-9, timeline


def _check_waiting(work: WaitingWork, requests: Iterable[Request]) -> None:
    """Assert that exactly the waiting ones of ``requests`` are counted."""
    waiting = [one for one in requests if one.status is RequestStatus.WAITING]
    assert work._tokens.keys() == {one.request_id for one in waiting}
    assert work.num_tokens == sum(work._tokens.values())
    assert work.num_by_rank == Counter(one.adapter_rank for one in waiting)


@check_invariants.register
def _check_running(running: RunningSet) -> None:
    """Assert that blocks, tokens and states of all requests agree."""
    assert running._grants.keys() == running._requests.keys() | running._draining.keys()
    check_grants(running._memory, running._grants.values())
    for request in running._requests.values():
        assert request.status is RequestStatus.RUNNING
        assert request.num_allocated_tokens == len(request.block_ids) * running._block_size
        assert request.num_computed_tokens <= request.num_allocated_tokens
        assert request.num_computed_tokens <= request.num_known_tokens
    for request in running._draining.values():
        assert request.status is not RequestStatus.RUNNING
        assert request.num_in_flight_steps > 0


@check_invariants.register
def _check_scheduler(scheduler: Scheduler) -> None:
    """Assert that all parts agree."""
    check_invariants(scheduler.memory)
    check_invariants(scheduler._running)
    _check_timelines(scheduler.timelines, scheduler._requests)
    _check_waiting(scheduler.waiting, scheduler._requests.values())
    num_waiting = sum(r.status is RequestStatus.WAITING for r in scheduler._requests.values())
    assert num_waiting == scheduler.num_waiting, (num_waiting, scheduler.num_waiting)
    assert num_waiting + scheduler.num_running == len(scheduler._requests)
    for request in scheduler._requests.values():
        num_real_tokens = request.num_prompt_tokens + request.num_output_tokens
        assert request.num_known_tokens == num_real_tokens + request.num_in_flight_samples
        assert request.num_known_tokens <= request.max_total_tokens
    if not scheduler.has_work():
        assert scheduler.memory.num_used_blocks == 0


@check_invariants.register
def _check_ledger(ledger: QuotaLedger) -> None:
    """Assert the invariant for each queue."""
    charged = sum(ledger._charged.values(), Counter[int]())
    for queue, quota in enumerate(ledger.quotas):
        assert ledger.available[queue] + charged[queue] == quota, (queue, quota, charged)


@check_invariants.register
def _check_holdings(holdings: Holdings) -> None:
    """Assert that each running request and each adapter in use is charged once."""
    check_invariants(holdings.ledger)
    adapters = {one.adapter_id: holdings.adapter_tokens(one) for one in holdings.requests}
    held = sum(one.num_tokens for one in holdings._holdings.values()) + sum(adapters.values())
    assert held + holdings.ledger.free_tokens == sum(holdings.ledger.quotas)


@check_invariants.register
def _check_policy(policy: ChameleonPolicy) -> None:
    """Assert that quotas add up."""
    check_invariants(policy._holdings)


@check_invariants.register
def _check_registry(registry: AdapterRegistry) -> None:
    """Assert that every version is in service, or draining with references."""
    served = {
        entry.version.adapter_id: name
        for name, entry in registry._entries.items()
        if entry.version is not None
    }
    for adapter_id, held in registry._held.items():
        assert held.version.adapter_id == adapter_id
        assert held.num_references >= 0
        assert held.is_draining == (adapter_id not in served)
        assert held.num_references > 0 or not held.is_draining
    for adapter_id, name in served.items():
        assert registry._held[adapter_id].version.name == name
    digests = {(one.version.digest, key) for key, one in registry._held.items()}
    assert digests == {(digest, key) for digest, ids in registry._ids_of.items() for key in ids}
    assert all(registry._ids_of.values())
    draining = {key: held for held in registry._draining.values() for key in held}
    assert draining.keys() == {key for key, held in registry._held.items() if held.is_draining}


def check_pages(pages: Pages, block_ids: Iterable[BlockId]) -> None:
    """Assert that each page is free, or has one owner. ``block_ids``: all blocks in use."""
    owned = [int(block_id) for block_id in block_ids]
    owned += [page for runs in pages._runs.values() for run in runs for page in run]
    assert len(set(owned)) == len(owned), "a page has two owners"
    free = set(range(pages.num_pages)).difference(pages.taken_pages(range(pages.num_pages)))
    assert free.isdisjoint(owned), "a page is free and in use"
    assert len(free) + len(owned) == pages.num_pages, "a page is lost"
    for extent, (left, whole) in enumerate(zip(pages._free, pages._whole, strict=True)):
        sets = (pages._empty, pages._of_blocks[left.bit_count()], pages._of_runs)
        serves_runs, is_partly_free = pages._serves_runs[extent], 0 != left != whole
        expected = (left == whole, is_partly_free and not serves_runs, is_partly_free and serves_runs)
        assert tuple(bool(one >> extent & 1) for one in sets) == expected, extent


def num_free_pages(pages: Pages) -> int:
    return pages.num_pages - len(pages.taken_pages(range(pages.num_pages)))


@check_invariants.register
def _check_ranges(ranges: RangeAllocator) -> None:
    """Assert that free ranges are not adjacent, and add up."""
    assert ranges._starts == sorted(ranges._sizes)
    assert ranges._by_size == sorted((size, start) for start, size in ranges._sizes.items())
    assert ranges.free_bytes == sum(ranges._sizes.values())
    end = -1
    for start in ranges._starts:
        assert start > end, "free ranges overlap or touch"
        assert start % ranges.granule_bytes == 0 and ranges._sizes[start] > 0
        end = start + ranges._sizes[start]
    assert end <= ranges.capacity_bytes


def _check_arena(arena: Any) -> None:
    """Assert that entries do not overlap."""
    with arena._lock:
        end = 0
        for start, size in sorted(part for e in arena._all_entries() for part in e.extents):
            assert start >= end, "extents overlap"
            end = start + size
        assert end <= arena.capacity_bytes
        assert all(entry.num_references for entry in arena._leaving)


with contextlib.suppress(ModuleNotFoundError):  # where policies run without mechanism
    from corun.shm.arena import HostArena

    check_invariants.register(HostArena, _check_arena)
