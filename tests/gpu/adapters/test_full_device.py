"""More adapters than the device holds: they come and go, and no request fails for memory."""

import random
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.resources import DeviceFacts, MemoryPlan, plan_memory
from corun.runtime.plan import AdapterId
from support.loading_engine import BLOCK_BYTES, SIZES, TIMEOUT_S, LoadingEngine, device_bytes

NUM_VERSIONS = 50
NUM_FITTING = 20
GIB = 2**30


class FakeGpuMemory:
    """Replaces torch's allocation for adapters, with a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert dtype is torch.uint8
        if self.taken_bytes + num_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"{self.taken_bytes} + {num_bytes} bytes")
        memory = np.empty(num_bytes, np.uint8)
        self.taken_bytes += num_bytes
        weakref.finalize(memory, self._free, num_bytes)
        return torch.from_numpy(memory)

    def _free(self, num_bytes: int) -> None:
        self.taken_bytes -= num_bytes


def cuda_plan() -> MemoryPlan:
    """As planned by an engine with room for this many adapters of the mean size."""
    room_bytes = NUM_FITTING * sum(map(device_bytes, SIZES)) // len(SIZES)
    total_bytes = room_bytes + NUM_FITTING * BLOCK_BYTES  # a page of each is not full
    config = EngineConfig(memory_gib=total_bytes / GIB, block_size=4)
    return plan_memory(config, DeviceFacts("cuda", total_bytes, BLOCK_BYTES), 64)


def test_fifty_adapters_in_room_for_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sizes, so that free memory is fragmented."""
    plan, rng = cuda_plan(), random.Random(0)
    gpu = FakeGpuMemory(1 << 20)  # buffers of loads, beside the pages
    monkeypatch.setattr("corun.gpu.adapters.copier.torch", gpu)
    engine = LoadingEngine(rng, plan, arena_bytes=1 << 20, contents="")
    try:
        versions: list[tuple[str, AdapterId]] = []
        for number in range(NUM_VERSIONS):
            name = SIZES[number % len(SIZES)]
            engine.register(name)
            versions.append((name, engine.served[name]))
        taken_bytes = gpu.taken_bytes
        for name, version in rng.sample(versions, NUM_VERSIONS) + rng.choices(versions, k=20):
            engine.ask(name, rng.randint(1, 9), version)
            for _ in range(rng.randint(0, 3)):
                engine.step()
        finish(engine)
        assert engine.num_failed == 0
        cache = engine.scheduler.memory.cache
        assert cache.log.evictions.total() >= NUM_VERSIONS - 2 * NUM_FITTING
        assert len(cache.resident_ids()) > NUM_FITTING // 2, "pieces are not most of it"
        assert gpu.taken_bytes == taken_bytes, "a load has asked for memory"
    finally:
        engine.close()


def test_addresses_of_a_captured_step_stay_valid_while_pages_are_lent_and_given_back() -> None:
    """Its kernels read tables at fixed addresses, and from there pointers into an adapter's pages."""
    engine = LoadingEngine(random.Random(1), cuda_plan(), arena_bytes=1 << 20, contents="")
    table, pool = engine.table, engine.pool
    tensors = [*table.mirror.tensors, pool]
    captured = [tensor.data_ptr() for tensor in tensors]
    pointers: dict[int, tuple[AdapterId, list[int]]] = {}  # by row, with the adapter
    num_changes = 0

    def check() -> None:
        nonlocal num_changes
        assert [tensor.data_ptr() for tensor in (*table.mirror.tensors, engine.pool)] == captured
        pages = engine.memory.cache.pages
        assert pages is not None
        owner_of = {
            page: adapter_id
            for adapter_id in engine.contents
            for run in pages.runs_of(adapter_id)
            for page in run
        }
        before, owners = dict(pointers), list[AdapterId]()
        pointers.clear()
        for row in table.contents:
            found = [int(one) for one in (*table.host_a_pointers[row], *table.host_b_pointers[row]) if one]
            (owner,) = {owner_of[(one - pool.data_ptr()) // BLOCK_BYTES] for one in found}
            owners.append(owner)
            pointers[row] = (owner, found)
            was_owner, was_found = before.get(row, (None, found))
            num_changes += was_owner != owner
            assert was_owner != owner or was_found == found, "its pointers have changed"
        assert len(set(owners)) == len(owners), "two rows point to one adapter"

    rng = random.Random(2)
    try:
        for number in range(NUM_VERSIONS):
            engine.register(SIZES[number % len(SIZES)])
        versions = [(name, version) for version, name in engine.contents.items()]
        for name, version in rng.choices(versions, k=30):
            engine.ask(name, rng.randint(1, 9), version)
            for _ in range(3):
                engine.step()
                check()
        finish(engine)
        check()
        assert engine.num_failed == 0 and num_changes > NUM_FITTING
    finally:
        engine.close()


def finish(engine: LoadingEngine) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while engine.live:
        engine.step(timeout_s=0.01)
        assert time.monotonic() < deadline_s, "it does not come to its end"
