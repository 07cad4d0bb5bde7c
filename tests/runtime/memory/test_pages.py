"""One pool of pages: how adapters are divided into runs, and where runs and blocks are."""

import random
from collections.abc import Sequence

import pytest
from corun.runtime.adapter import AdapterFacts
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.grant import Grant
from corun.runtime.memory.pages import Pages, pack_runs
from corun.runtime.memory.report import memory_report
from corun.runtime.plan import BASE_ADAPTER, AdapterId, AdapterTransfer, BlockId, TransferResult
from hypothesis import given
from hypothesis import strategies as st
from support.invariants import check_grants, check_invariants, check_pages, num_free_pages
from support.scheduling import BLOCK_BYTES, BLOCK_SIZE, make_memory

# Of a model: layers, bytes of a block of 16 tokens, and (in, out) features of each target.
LLAMA_7B = (32, 8 << 20, [(4096, 4096)] * 4)
LLAMA_8B = (32, 2 << 20, [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)] + [(4096, 14336)] * 3)
QWEN_05B = (24, 196_608, [(896, 896), (896, 128), (896, 128), (896, 896)] + [(896, 4864)] * 3)
PAPER_RANKS = (8, 16, 32, 64, 128)
KIB = 1024


def matrices(model: tuple[int, int, list[tuple[int, int]]], rank: int) -> tuple[int, ...]:
    """Bytes of all matrices of an adapter in two bytes a value, aligned to 64."""
    num_layers, _, targets = model
    layer = [-(-2 * rank * width // 64) * 64 for target in targets for width in target]
    return tuple(layer * num_layers)


def check_packing(sizes: tuple[int, ...], page_bytes: int) -> int:
    """No matrix overlaps another or leaves its run. Return the wasted bytes."""
    run_pages, places = pack_runs(sizes, page_bytes)
    ends = [0] * len(run_pages)
    for (run, offset), size in sorted(zip(places, sizes, strict=True)):
        assert offset >= ends[run], "two matrices overlap"
        ends[run] = offset + size
    for end, pages in zip(ends, run_pages, strict=True):
        assert (pages - 1) * page_bytes < end <= pages * page_bytes
    return sum(run_pages) * page_bytes - sum(sizes)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 60)), max_size=8),
    st.sampled_from((64, 640, 4096)),
)
def test_an_adapter_wastes_at_most_a_page_and_a_hundredth(
    counts: list[tuple[int, int]], page_bytes: int
) -> None:
    sizes = tuple(64 * size for size, number in counts for _ in range(number))
    assert 0 <= check_packing(sizes, page_bytes) <= page_bytes + sum(sizes) / 100


@pytest.mark.parametrize("model", [LLAMA_7B, LLAMA_8B, QWEN_05B], ids=["7B", "8B", "0.5B"])
def test_over_the_ranks_of_the_papers_five_hundredths_are_wasted(
    model: tuple[int, int, list[tuple[int, int]]],
) -> None:
    sizes = [matrices(model, rank) for rank in PAPER_RANKS]
    wasted_bytes = sum(check_packing(one, model[1]) for one in sizes)
    assert wasted_bytes <= 0.05 * sum(map(sum, sizes))
    longest = max(max(pack_runs(one, model[1])[0]) for one in sizes)
    assert longest * model[1] <= 2 * max(map(max, sizes)) + model[1], "runs are not longer than needed"


def test_blocks_and_runs_begin_at_the_two_ends() -> None:
    pages = Pages(64 * 64, 1)
    assert pages.take_blocks(65) == list(range(65))
    pages.take_runs(AdapterId(1), (3, 70, 1))
    first, long, last = pages.runs_of(AdapterId(1))
    assert (len(first), long, len(last)) == (3, range(62 * 64, 62 * 64 + 70), 1)
    assert min(first.start, last.start) > long.stop - 1, "it fills the extent that it has begun"
    pages.free_blocks(map(BlockId, range(64)))
    assert pages.take_blocks(1) == [64 + 1], "of an extent that is theirs"
    check_pages(pages, [BlockId(64), BlockId(65)])


def test_blocks_fill_the_extents_with_the_fewest_free_pages() -> None:
    pages = Pages(256, 1)  # extents of four pages
    pages.free_blocks([BlockId(page) for page in pages.take_blocks(16) if page in (0, 1, 2, 6, 8, 9)])
    assert pages.take_blocks(4) == [6, 8, 9, 0]
    assert pages.take_blocks(3) == [1, 2, 16]
    check_pages(pages, map(BlockId, range(17)))


def test_the_last_pages_serve_both() -> None:
    pages = Pages(64 * 4, 1)  # extents of four pages
    assert pages.extent_pages == 4
    pages.take_runs(AdapterId(1), (3,))
    taken = pages.take_blocks(253)
    assert num_free_pages(pages) == 0 and taken[-1] == 255
    pages.free_blocks([taken[0], taken[2]])
    assert pages.lacking_run((1, 1)) is None and pages.lacking_run((1, 2)) == 2
    pages.take_runs(AdapterId(2), (1, 1))
    assert pages.runs_of(AdapterId(2)) in ((range(0, 1), range(2, 3)), (range(2, 3), range(0, 1)))
    pages.free_runs(AdapterId(1))
    assert pages.take_blocks(3) == [252, 253, 254]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400)), max_size=40), st.integers(1, 400))
def test_no_page_is_lost_or_given_twice(acts: list[tuple[int, int]], num_pages: int) -> None:
    pages, blocks, there = Pages(num_pages, 1), list[BlockId](), list[AdapterId]()
    for number, (act, size) in enumerate(acts, start=1):
        run_pages = (1 + size % 9,) * (size % 5) + (1 + size // 5,)
        if act == 0 and size <= num_free_pages(pages):
            blocks += pages.take_blocks(size)
        elif act == 1:
            pages.free_blocks(blocks[size % 7 :: 2])
            del blocks[size % 7 :: 2]
        elif act == 2 and pages.lacking_run(run_pages) is None:
            assert pages.could_hold(run_pages)
            pages.take_runs(AdapterId(number), run_pages)
            assert tuple(map(len, pages.runs_of(AdapterId(number)))) == run_pages
            there.append(AdapterId(number))
        elif act == 3 and there:
            pages.free_runs(there.pop(size % len(there)))
        check_pages(pages, blocks)
    pages.free_blocks(blocks)
    for adapter_id in there:
        pages.free_runs(adapter_id)
    assert num_free_pages(pages) == num_pages, "what is free comes together again"
    check_pages(pages, ())


class Crowd:
    """Requests with adapters of all ranks, in a memory that is full of history."""

    def __init__(self, rng: random.Random, num_pages: int) -> None:
        self.rng = rng
        self.memory: DeviceMemory = make_memory(num_blocks=num_pages, has_pages=True, keeps_prefixes=True)
        self.grants: list[Grant] = []
        self.num_loads = self.num_refused = 0
        self.now_s = 0.0
        self.use_shares: list[float] = []
        runs = [pack_runs(matrices(QWEN_05B, rank), QWEN_05B[1])[0] for rank in PAPER_RANKS]
        self.facts = {
            AdapterId(number): AdapterFacts(
                f"content {number}", 8, sum(run_pages) * BLOCK_BYTES, run_pages=run_pages
            )
            for number, run_pages in enumerate(runs * 8, start=1)
        }

    def arrive(self) -> None:
        """A request begins, if there is room for its adapter and its blocks."""
        self.now_s += 1.0
        adapter_id = self.rng.choice(tuple(self.facts)) if self.rng.random() < 0.3 else BASE_ADAPTER
        adapter, memory = self.facts.get(adapter_id), self.memory
        if adapter is not None and memory.cache.state(adapter_id) is AdapterState.ABSENT:
            self.num_loads += 1
            memory.room.make_adapter_room(adapter, include_waiting=True)
            command = memory.loads.begin(adapter_id, adapter, self.now_s)
            if command is None:
                self.num_refused += memory.budget.available_bytes >= adapter.num_bytes
                return
            self.end_load(command)
        num_blocks = self.rng.randint(1, 200)
        if memory.pool.num_available_blocks < num_blocks:
            memory.reclaim_growth(num_blocks)
        if memory.cache.state(adapter_id) is AdapterState.ABSENT:
            return  # its load has failed, or it has made room for the blocks
        grant = Grant(adapter_id)
        memory.cache.acquire(adapter_id, self.now_s)
        if not memory.grow(grant, num_blocks):
            memory.cache.release(adapter_id)
            return
        self.grants.append(grant)
        for _ in range(num_blocks):
            tokens = tuple(self.rng.choices(range(1000), k=BLOCK_SIZE))
            memory.store(grant, bytes([adapter_id]), tokens, self.now_s)

    def end_load(self, command: AdapterTransfer) -> None:
        pages = [page for run in command.runs for page in run]
        assert len(pages) * BLOCK_BYTES == command.num_bytes
        error = "it fails" if self.rng.random() < 0.05 else None
        self.memory.end_transfer(TransferResult(command.transfer_id, error), self.now_s)

    def num_held_pages(self) -> int:
        """Pages that running requests use."""
        adapters = (self.facts[one].run_pages for one in self.memory.cache.referenced_ids())
        return self.memory.num_used_blocks + sum(map(sum, adapters))

    def turn(self) -> None:
        """What runs has at most 0.8 of the memory; history and idle adapters fill the rest."""
        while self.grants and self.num_held_pages() > 0.8 * self.memory.num_blocks:
            self.memory.release(self.grants.pop(self.rng.randrange(len(self.grants))))
        self.arrive()
        self.memory.commands(self.now_s)
        self.use_shares.append(1 - self.memory.budget.free_bytes / self.memory.capacity_bytes)


@pytest.mark.parametrize("seed", range(2))
def test_in_full_memory_hardly_any_load_lacks_a_run(seed: int) -> None:
    crowd = Crowd(random.Random(seed), 6400)
    for number in range(500):
        crowd.turn()
        if number % 25 == 0:
            check_invariants(crowd.memory)
            check_grants(crowd.memory, crowd.grants)
    assert sum(crowd.use_shares[200:]) / 300 >= 0.94, "it is not full"
    pages = crowd.memory.cache.pages
    assert pages is not None and crowd.num_loads > 80
    assert crowd.num_refused <= crowd.num_loads / 1000
    assert 0 < pages.num_loads_without_run <= pages.num_extents_evicted


def fill(memory: DeviceMemory, num_blocks: int, namespace: bytes = b"base") -> Grant:
    """A base model's request with whole blocks of its own."""
    grant = Grant(BASE_ADAPTER)
    memory.cache.acquire(BASE_ADAPTER)
    assert memory.grow(grant, num_blocks)
    for number in range(num_blocks):
        memory.store(grant, namespace, (number,) * BLOCK_SIZE, 0.0)
    return grant


def scattered(
    num_pages: int, held: Sequence[int], *, keeps_prefixes: bool = True
) -> tuple[DeviceMemory, list[Grant]]:
    """Unused history all over, or free pages; the blocks ``held`` are of requests."""
    memory = make_memory(num_blocks=num_pages, has_pages=True, keeps_prefixes=keeps_prefixes)
    grants = []
    for number in range(num_pages):
        grant = Grant(BASE_ADAPTER)
        memory.cache.acquire(BASE_ADAPTER)
        assert memory.grow(grant, 1)
        if keeps_prefixes:
            memory.store(grant, b"base", (number,) * BLOCK_SIZE, float(number))
        grants.append(grant)
    for number, grant in enumerate(grants):
        if number not in held:
            memory.release(grant)
    return memory, [grants[number] for number in held]


def adapter_of(*run_pages: int) -> AdapterFacts:
    return AdapterFacts("content", 8, sum(run_pages) * BLOCK_BYTES, run_pages=run_pages)


def test_a_load_without_a_run_evicts_a_whole_extent() -> None:
    memory, _ = scattered(256, held=(2,))  # extents of four pages
    pages = memory.cache.pages
    assert pages is not None
    memory.room.reclaim(3, 0, include_waiting=False, keep=BASE_ADAPTER)
    assert pages.taken_pages(range(8)) == [2, 4, 5, 6, 7], "the least recently used ones have gone"
    assert not memory.room.has_adapter_room(adapter_of(3)) and memory.room.has_adapter_room(adapter_of(2))
    assert memory.room.make_adapter_room(adapter_of(3), include_waiting=False)
    assert pages.taken_pages(range(12)) == [2, 8, 9, 10, 11], "the extent of the next one"
    report = memory_report(memory, 0.0)
    assert (report.num_loads_without_run, report.num_extents_evicted) == (1, 1)
    assert memory.loads.begin(AdapterId(1), adapter_of(3), 0.0) is not None
    check_invariants(memory)


def test_used_blocks_in_every_extent_are_in_the_way() -> None:
    memory, grants = scattered(256, held=range(1, 256, 4))
    pages = memory.cache.pages
    assert pages is not None
    assert not memory.room.make_adapter_room(adapter_of(3), include_waiting=True)
    assert pages.num_extents_evicted == 0
    memory.release(grants.pop(7))
    assert memory.room.make_adapter_room(adapter_of(3), include_waiting=True)
    (run,) = (memory.loads.begin(AdapterId(1), adapter_of(3), 0.0) or pytest.fail("no room")).runs
    assert run.start // 4 == 7
    check_invariants(memory)


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_what_lacks_a_run_is_looked_for_again_when_a_use_has_ended(
    monkeypatch: pytest.MonkeyPatch, *, keeps_prefixes: bool
) -> None:
    memory, grants = scattered(256, held=range(1, 256, 4), keeps_prefixes=keeps_prefixes)
    assert not memory.room.make_adapter_room(adapter_of(3), include_waiting=True)
    with monkeypatch.context() as patch:
        patch.setattr(Pages, "window_at", lambda *_, **__: pytest.fail("it is looked for in vain"))
        assert not memory.room.make_adapter_room(adapter_of(3), include_waiting=True)
    path = tuple(grants[-1].path)
    memory.prefixes.hold(path)  # as a copy to the host does
    memory.release(grants.pop())
    assert memory.room.make_adapter_room(adapter_of(3), include_waiting=True) is not keeps_prefixes
    memory.prefixes.release(path)
    assert memory.room.make_adapter_room(adapter_of(3), include_waiting=True)


@pytest.mark.parametrize("event", ["failed load", "pinned load", "unpin"])
def test_and_when_a_load_or_a_pin_has_ended(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    memory, _ = scattered(256, held=[page for page in range(1, 256, 4) if page not in (29, 37)])
    loads = []
    for adapter_id in map(AdapterId, (1, 2)):
        memory.pins.pin(adapter_id, adapter_of(3))
        assert memory.room.make_adapter_room(adapter_of(3), include_waiting=True)
        loads.append(memory.loads.begin(adapter_id, adapter_of(3), 0.0) or pytest.fail("no room"))
    memory.cache.acquire(AdapterId(2))
    if event == "unpin":
        memory.end_transfer(TransferResult(loads[0].transfer_id), 0.0)
    elif event == "pinned load":
        memory.cache.release(AdapterId(2))

    def has_room() -> bool:
        return memory.room.make_adapter_room(adapter_of(3), include_waiting=True)

    assert not has_room()
    with monkeypatch.context() as patch:
        patch.setattr(Pages, "window_at", lambda *_, **__: pytest.fail("it is looked for in vain"))
        assert not has_room()
    if event == "unpin":
        memory.pins.unpin(AdapterId(1))
    else:
        error = "the file is gone" if event == "failed load" else None
        memory.end_transfer(TransferResult(loads[0].transfer_id, error), 0.0)
    assert has_room()
    check_invariants(memory)


def test_a_pinned_adapter_that_does_not_help_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = scattered(256, held=[page for page in range(1, 256, 4) if page != 29])
    memory.pins.pin(AdapterId(1), adapter_of(3))
    assert memory.room.make_adapter_room(adapter_of(3), include_waiting=True)
    load = memory.loads.begin(AdapterId(1), adapter_of(3), 0.0)
    assert load is not None
    memory.end_transfer(TransferResult(load.transfer_id), 0.0)
    assert not memory.room.make_adapter_room(adapter_of(5), include_waiting=True)
    monkeypatch.setattr(Pages, "window_at", lambda *_, **__: pytest.fail("it is looked for in vain"))
    assert not memory.room.make_adapter_room(adapter_of(5), include_waiting=True)


def test_an_extent_without_a_victim_is_evicted_with_what_follows_it_in_its_prefix() -> None:
    memory = make_memory(num_blocks=256, has_pages=True, keeps_prefixes=True)
    prefix, others = fill(memory, 4), []
    for number in range(5):
        others.append(fill(memory, 3, b"%d" % number))
        assert memory.grow(prefix, 1)
        memory.store(prefix, b"base", (9,) * BLOCK_SIZE, 0.0)
    others.append(fill(memory, memory.pool.num_available_blocks, b"rest"))
    memory.release(prefix)
    assert memory.room.make_adapter_room(adapter_of(3), include_waiting=False)
    assert memory.pool.num_cached_blocks == 0 and memory.pool.num_available_blocks == 9
    check_invariants(memory)
    check_grants(memory, others)


def test_extents_are_not_evicted_without_a_gain() -> None:
    pages = Pages(256, 1)  # extents of four pages
    blocks = pages.take_blocks(256)

    def window(*, must_gain: bool) -> range | None:
        return pages.window_at(3, 3, lambda page: page < 4, must_gain=must_gain)

    pages.free_blocks(blocks[:2])
    assert window(must_gain=True) == range(4)
    pages.free_blocks(blocks[2:3])
    assert window(must_gain=True) is None and window(must_gain=False) == range(4)
    pages.free_blocks(blocks[3:4])
    assert window(must_gain=False) is None, "nothing is left to evict"


def test_nothing_is_evicted_for_the_first_run_if_there_is_no_place_for_the_second() -> None:
    memory, grants = scattered(256, held=[page for page in range(1, 256, 4) if page != 29])
    pages = memory.cache.pages
    assert pages is not None
    memory.room.reclaim(8, 0, include_waiting=False, keep=BASE_ADAPTER)
    taken = pages.taken_pages(range(256))
    assert not memory.room.make_adapter_room(adapter_of(3, 3), include_waiting=True)
    assert pages.taken_pages(range(256)) == taken
    assert (pages.num_loads_without_run, pages.num_extents_evicted) == (0, 0)
    check_invariants(memory)
    memory.release(grants.pop(9))
    assert memory.room.make_adapter_room(adapter_of(3, 3), include_waiting=True)
    assert (pages.num_loads_without_run, pages.num_extents_evicted) == (1, 2)
    assert memory.loads.begin(AdapterId(1), adapter_of(3, 3), 0.0) is not None
    check_invariants(memory)
    check_grants(memory, grants)


def test_a_run_is_longer_than_an_extent() -> None:
    memory, grants = scattered(256, held=(9, 100))
    pages = memory.cache.pages
    assert pages is not None
    assert memory.can_ever_hold(0, 0, run_pages=(256,)) and not memory.can_ever_hold(0, 0, run_pages=(255, 3))
    assert memory.room.make_adapter_room(adapter_of(9), include_waiting=False)
    command = memory.loads.begin(AdapterId(1), adapter_of(9), 0.0)
    assert command is not None and command.runs[0].start % 4 == 0
    check_invariants(memory)
    check_grants(memory, grants)


def test_evicting_a_block_takes_what_follows_it_in_its_prefix() -> None:
    memory = make_memory(num_blocks=256, has_pages=True, keeps_prefixes=True)
    memory.release(fill(memory, 256))
    assert memory.room.make_adapter_room(adapter_of(4, 4), include_waiting=False)
    assert memory.pool.num_cached_blocks <= 256 - 8
    assert memory.loads.begin(AdapterId(1), adapter_of(4, 4), 0.0) is not None
    check_invariants(memory)


def test_pinned_adapters_in_the_way_are_loaded_again() -> None:
    memory = make_memory(num_blocks=64, has_pages=True)
    for number in range(1, 65):
        assert memory.cache.begin_load(AdapterId(number), BLOCK_BYTES, (1,))
        memory.cache.finish_load(AdapterId(number))
    pages = memory.cache.pages
    assert pages is not None
    for number in range(1, 65):
        if number % 2:
            memory.pins.pin(AdapterId(number), adapter_of(1))
    assert not memory.room.make_adapter_room(adapter_of(3), include_waiting=False)
    assert memory.room.make_adapter_room(adapter_of(3), include_waiting=True)
    assert 1 <= len(memory.pins.to_load()) <= 2
    assert memory.cache.log.evictions.total() >= 3
    check_invariants(memory)
