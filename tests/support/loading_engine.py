"""Scheduler, executor and loads of an engine on the CPU device, with a link that a test controls.

All parts are real but the model and the sampler: a pass computes the adapters' deltas of every
layer and compares them with PEFT's.
"""

import functools
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from corun.gpu.adapters.arrival import AdapterLoad, Copied
from corun.gpu.adapters.copier import DevicePages
from corun.gpu.adapters.host import HostAdapters
from corun.gpu.coexec.assistant import Assistant
from corun.gpu.coexec.handover import Exchange
from corun.gpu.coexec.host_handover import HostHandover
from corun.gpu.device.cpu import CpuDevice
from corun.gpu.device.link import LinkTransfer, PacedLink
from corun.gpu.execution.executor import AdapterFetch, DeviceExecutor
from corun.gpu.execution.sampler import SampledRow, Sampler
from corun.gpu.forward.batch import DeltaPass, StepContext
from corun.gpu.forward.lower import ForwardInputs
from corun.gpu.lora.deltas import ResidentDeltas
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from corun.gpu.model.targets import build_target_map
from corun.profiles.link import Direction
from corun.runtime.adapter import AdapterFacts
from corun.runtime.adapters.load import OpenAdapter, open_adapter
from corun.runtime.adapters.resolved import AdapterPath
from corun.runtime.engine.assembly.resources import MemoryPlan
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import (
    AdapterId,
    AdapterTransfer,
    HostPlace,
    Outcome,
    RequestId,
    StepPlan,
    StepResult,
    SubBatchKind,
)
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk, StepRows
from corun.runtime.scheduler.events import RequestUpdate
from support.architectures import make_model
from support.host_adapters import copied
from support.invariants import check_invariants
from support.peft_adapters import load_with_peft, save_adapter
from support.random_cold_starts import RandomColdStarts
from support.scheduling import BLOCK_SIZE, make_memory, make_request, make_scheduler

CONTENTS = "abc"
SIZES = "ade"  # small, smaller, and four times as large
_MAX_RANK = 64
TIMEOUT_S = 30.0
BLOCK_BYTES = 1024
_NUM_BLOCKS = 12
_ARENA_BYTES = 60_000  # two of the three adapters


class HeldLink(PacedLink):
    """Lets copies begin one by one or all together, and fails as many as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True
        self.num_to_fail = 0
        self._passes = threading.Semaphore(0)

    def let(self, num_copies: int) -> None:
        self._passes.release(num_copies)

    def begin(self, direction: Direction, num_bytes: int, *, start_s: float | None = None) -> LinkTransfer:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self.is_open and not self._passes.acquire(timeout=0.001):
            assert time.monotonic() < deadline_s, "a copy was never let go"
        if self.num_to_fail:
            self.num_to_fail -= 1
            raise RuntimeError("the link failed")
        return super().begin(direction, num_bytes, start_s=start_s)


@functools.cache
def _files() -> tuple[tempfile.TemporaryDirectory[str], dict[str, dict[int, torch.Tensor]]]:
    """A directory per content; and by target the product of ones and its delta matrix."""
    directory = tempfile.TemporaryDirectory()
    target_map = build_target_map(make_model("llama3-rope"))
    sums: dict[str, dict[int, torch.Tensor]] = {}
    options: dict[str, dict[str, Any]] = {"d": {"r": 3, "target_modules": ["q_proj"]}, "e": {"r": 16}}
    for seed, name in enumerate(dict.fromkeys(CONTENTS + SIZES)):
        path = Path(directory.name) / name
        wanted = {"target_modules": ["q_proj", "v_proj", "up_proj"]} | options.get(name, {})
        save_adapter(path, seed=seed, **wanted)
        model, sums[name] = load_with_peft(path), {}
        for target in target_map.targets:
            module = model.get_submodule(f"base_model.model.{target.path}")
            if hasattr(module, "get_delta_weight"):
                sums[name][target.index] = module.get_delta_weight("default").sum(dim=1).detach()
    return directory, sums


@functools.cache
def _target_map() -> Any:
    return build_target_map(make_model("llama3-rope"))


class _ColdStarts(RandomColdStarts):
    """Plans rows for workers now and then, though there are none; not for retried rows."""

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        if request.retried_positions[request.num_computed_tokens] > 1:
            return None  # it waits for the whole adapter
        chunk = super().next_chunk(request, max_tokens, num_others, rows, now_s)
        if chunk is None or (chunk.split_layer < 3 and not request.retried_positions):
            return chunk
        return ColdChunk(chunk.num_tokens, 0)


class _Table(LoraTable):
    """Knows what its rows hold."""

    def __init__(self, engine: "LoadingEngine") -> None:
        super().__init__(len(_target_map().targets), 64, "cpu")
        self._engine = engine
        self.contents: dict[int, str] = {}

    def add(self, adapter: DeviceAdapter) -> int:
        row = super().add(adapter)
        self.contents[row] = self._engine.content_of(adapter)
        return row

    def remove(self, row: int) -> None:
        super().remove(row)
        del self.contents[row]


class _Runner:
    """Computes deltas of ones, and records for each pass the tokens with correct ones."""

    def __init__(self, engine: "LoadingEngine") -> None:
        self._engine = engine
        self.block_size = BLOCK_SIZE
        self.device = torch.device("cpu")
        self.progress = StepContext().progress
        self.pool = SimpleNamespace(release=lambda blocks: None, block_bytes=BLOCK_BYTES)
        self.passes: dict[tuple[int, ...], list[bool]] = {}  # by the rows' first blocks
        self._groups: dict[tuple[int, int], list[Any]] = {}
        for target in _target_map().targets:
            self._groups.setdefault((target.layer, target.input_group), []).append(target)

    def forward(self, inputs: ForwardInputs, deltas: DeltaPass | None, *_: object) -> torch.Tensor:
        num_tokens = inputs.attention.num_tokens
        self._write_kv(inputs)
        right = torch.ones(num_tokens, dtype=torch.bool)
        if inputs.lora is not None:
            owner = self._engine.table.contents
            lora = inputs.lora
            contents: list[str | None] = [None] * num_tokens
            for start, end, row in zip(
                lora.segment_starts_host, lora.segment_ends_host, lora.table_rows_host, strict=True
            ):
                contents[start:end] = [owner[row]] * (end - start)
            deltas = deltas or ResidentDeltas(self._engine.backend, lora)
            for key, targets in self._groups.items():
                x = torch.ones(num_tokens, targets[0].in_features)
                ys = [torch.zeros(num_tokens, target.out_features) for target in targets]
                deltas.begin(key, x)
                deltas.add(key, x, ys, [target.index for target in targets])
                for target, y in zip(targets, ys, strict=True):
                    right &= self._are_right(contents, target.index, y)
        self.passes[tuple(inputs.attention.block_tables[:, 0].tolist())] = right.tolist()
        return torch.zeros(len(inputs.logit_indices), 4)

    def _write_kv(self, inputs: ForwardInputs) -> None:
        """Overwrite all blocks of the rows with NaN: no adapter may be there."""
        for table, length in zip(
            inputs.attention.block_tables.tolist(), inputs.attention.context_lens_host, strict=True
        ):
            for block in table[: -(-length // BLOCK_SIZE)]:
                self._engine.pool[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = 255

    def close(self) -> None:
        """Nothing is held."""

    def _are_right(self, contents: Sequence[str | None], index: int, y: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(y.shape[1])
        sums = _files()[1]
        wanted = torch.stack([sums[c].get(index, zero) if c else zero for c in contents])
        return torch.isclose(y, wanted, rtol=1e-3, atol=1e-4).all(dim=1)


class _Sampler(Sampler):
    def sample(self, logits: torch.Tensor, states: Sequence[object]) -> list[SampledRow]:
        return [SampledRow(3, None) for _ in states]


def random_memory(rng: random.Random) -> MemoryPlan:
    """Blocks, and room for one to three adapters, as bytes or as pages."""
    kv_bytes, room_bytes = _NUM_BLOCKS * BLOCK_BYTES, rng.choice((1, 2, 3)) * device_bytes("a")
    if rng.random() < 0.5:
        return MemoryPlan(kv_bytes + room_bytes, _NUM_BLOCKS, 64)
    num_pages = _NUM_BLOCKS + -(-room_bytes // BLOCK_BYTES) + 1
    return MemoryPlan(num_pages * BLOCK_BYTES, _NUM_BLOCKS, 64, num_pages=num_pages)


@functools.cache
def device_bytes(name: str) -> int:
    """Bytes of an adapter on the device."""
    device = CpuDevice()
    backend = TorchLora(LoraTable(len(_target_map().targets), 1, "cpu"), dtype=torch.float32)
    host = HostAdapters(
        device, backend, torch.float32, torch.device("cpu"), _target_map(), copied(1 << 20), _open
    )
    num_bytes = host.register(str(Path(_files()[0].name) / name), lambda _: None).num_bytes
    host.close()
    device.close()
    return num_bytes


class LoadingEngine:
    """Requests in, events out; the adapters' versions are kept here."""

    def __init__(
        self,
        rng: random.Random,
        plan: MemoryPlan | None = None,
        *,
        arena_bytes: int = _ARENA_BYTES,
        contents: str = CONTENTS,
    ) -> None:
        """A plan with pages has them from the start; without, memory is allocated per adapter."""
        plan = plan or random_memory(rng)
        self.link = HeldLink()
        self.device = CpuDevice(link=self.link)
        self.table = _Table(self)
        self.backend = TorchLora(self.table, dtype=torch.float32)
        pages, num_pages = None, plan.num_pages or plan.num_blocks
        self.pool = torch.zeros(num_pages * BLOCK_BYTES, dtype=torch.uint8)
        if plan.num_pages is not None:
            pages = DevicePages(self.pool, BLOCK_BYTES, _MAX_RANK)
        self.host = HostAdapters(
            self.device,
            self.backend,
            torch.float32,
            torch.device("cpu"),
            _target_map(),
            replace(copied(arena_bytes), pages=pages),
            _open,
            lambda layer_bytes: range(len(layer_bytes)),
        )
        compute = self.device.stream("compute")
        self.device.adopt(compute)
        self.host.set_compute_stream(compute)
        exchange = Exchange(self.device, compute, compute)
        num_layers = 1 + max(target.layer for target in _target_map().targets)
        assistant = Assistant(HostHandover(exchange), self.backend, None, num_layers)
        self._runner = _Runner(self)
        self.executor = DeviceExecutor(
            self._runner,  # type: ignore[arg-type]
            _Sampler(()),
            self.table,
            AdapterFetch(self._fetch, self.host.evict),
            max_model_len=64,
            assistant=assistant,
        )
        self._arrivals: list[tuple[Copied, str]] = []  # and their contents
        self.contents: dict[AdapterId, str] = {}  # of all versions, until they are gone
        self.digests: dict[str, str] = {}
        self.served: dict[str, AdapterId] = {}
        self.live: dict[RequestId, AdapterId] = {}
        self._retired: set[AdapterId] = set()
        self.memory = make_memory(
            num_blocks=plan.num_blocks,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=plan.capacity_bytes,
            has_pages=pages is not None,
            host=HostCache(self.host.arena.capacity_bytes),
        )
        self._facts: dict[str, AdapterFacts] = {}
        for name in contents:
            self.register(name)
        cold_starts = _ColdStarts(rng, self.memory.transfers, start_share=0.7, blocking_share=0.0)
        self.scheduler = make_scheduler(memory=self.memory, cold_starts=cold_starts, max_num_seqs=2)
        self.num_failed = 0
        self._now_s = 0.0
        self._num_requests = 0
        self._first_blocks: dict[RequestId, int] = {}  # of those in the step

    def register(self, name: str) -> None:
        """Serve a content under a new version, from now on."""
        facts = self._read(str(Path(_files()[0].name) / name))
        self._facts[name] = facts
        adapter_id = AdapterId(len(self.contents) + 1 + 100 * len(self.digests))
        while adapter_id in self.contents:
            adapter_id = AdapterId(adapter_id + 1)
        self.contents[adapter_id], self.digests[name] = name, facts.digest
        self.served[name] = adapter_id

    def unload(self, name: str) -> None:
        """Unload a version; earlier requests are still served."""
        self._retired.add(self.served.pop(name))

    def ask(self, name: str, num_tokens: int, version: AdapterId | None = None) -> None:
        """Request tokens of the served version, or of ``version``."""
        self._num_requests += 1
        adapter_id = self.served[name] if version is None else version
        request = make_request(
            self._num_requests,
            prompt=num_tokens,
            adapter_id=adapter_id,
            adapter=self._facts[self.contents[adapter_id]],
            max_tokens=5,
        )
        self.scheduler.add_request(request, self._now_s)
        self.live[request.request_id] = adapter_id

    def abort(self, request_id: RequestId) -> None:
        assert self.scheduler.abort(request_id, self._now_s) is not None
        del self.live[request_id]

    def step(self, timeout_s: float = 0.0) -> None:
        """One turn of the engine's loop, which waits up to ``timeout_s`` for an event."""
        self._now_s += 1.0
        self._drop()
        plan = self.scheduler.schedule(self._now_s)
        if plan is not None:
            self._submit(plan)
        for result in self.executor.poll(timeout_s):
            if plan is not None and isinstance(result, StepResult):
                self._check(plan, result)
            self._note(self.scheduler.update(result, self._now_s))
        check_invariants(self.scheduler)
        self._check_host()
        for adapter_id in self.scheduler.memory.take_removed():
            name = self.contents.pop(adapter_id)
            if name not in self.contents.values():
                self.memory.drop_content(self.digests[name])
                self.host.remove_content(self.digests[name])

    def drain(self) -> None:
        """Complete all requests and transfers, and evict all adapters."""
        self.link.is_open, self.link.num_to_fail = True, 0
        deadline_s = time.monotonic() + TIMEOUT_S
        for name in tuple(self.served):
            self.unload(name)
        while self.scheduler.has_work() or self._retired:
            self.step(timeout_s=0.01)  # or the other threads would wait for this one
            assert time.monotonic() < deadline_s, "it does not come to its end"
        assert not self.live

    def check_nothing_is_left(self) -> None:
        """After ``drain``, with adapters gone from the device."""
        check_invariants(self.host.arena)
        assert self.host.arena.num_references == 0
        assert self.host.arena.place_ids == frozenset()
        assert self.table.num_free_rows == self.table.capacity
        assert self.device.num_events == 0, "events are kept"
        memory = self.scheduler.memory
        assert memory.budget.free_bytes == memory.budget.capacity_bytes
        assert not self.contents and self.executor.is_idle

    def close(self) -> None:
        self.link.is_open = True
        self.executor.close()
        self.host.close()
        self.device.close()

    def content_of(self, adapter: DeviceAdapter) -> str:
        """The newest content that was fetched as this adapter."""
        arrivals = reversed(self._arrivals)
        return next(name for arrival, name in arrivals if arrival.adapter is adapter)

    def _submit(self, plan: StepPlan) -> None:
        # A pass may wait for copies, which then run without the test.
        is_held = not self.link.is_open
        kinds = {batch.kind for batch in plan.sub_batches}
        self.link.is_open |= SubBatchKind.ASSISTED in kinds
        self._first_blocks = {r.request_id: r.block_ids[0] for r in self.scheduler.requests if r.block_ids}
        self.executor.submit(plan)
        self.link.is_open = not is_held

    def _check(self, plan: StepPlan, result: StepResult) -> None:
        """Check that all valid tokens are correct, and that only planned passes ran."""
        retried = {row.request_id for row in result.rows if row.outcome is Outcome.RETRY}
        passes, blocks = self._runner.passes, self._first_blocks
        for batch in plan.sub_batches:
            is_right = passes.pop(tuple(blocks[request_id] for request_id in batch.request_ids), None)
            if is_right is None:  # it was refused
                assert retried.issuperset(batch.request_ids)
                continue
            first = 0
            for request_id, number in zip(batch.request_ids, batch.num_tokens, strict=True):
                is_good = request_id in retried or all(is_right[first : first + number])
                assert is_good, "wrong deltas count"
                first += number
        assert not passes

    def _drop(self) -> None:
        for adapter_id in self._retired - set(self.live.values()):
            self.scheduler.memory.drop(adapter_id)
            self._retired.remove(adapter_id)

    def _note(self, events: Sequence[RequestUpdate]) -> None:
        for event in events:
            assert event.request_id in self.live
            if event.finish_reason is not None:
                assert event.error_kind in {None, "AdapterUnavailableError"}, event
                self.num_failed += event.error_kind is not None
                del self.live[event.request_id]

    def _fetch(self, transfer: AdapterTransfer) -> AdapterLoad:
        assert transfer.host is not None
        name = self.contents[transfer.adapter_id]
        path = str(Path(_files()[0].name) / name)
        load = self.host.fetch(self.digests[name], path, transfer.host)
        assert isinstance(load, Copied)
        self._arrivals.append((load, name))
        return load

    def _read(self, path: str) -> AdapterFacts:
        """Register a directory as the adapter manager does."""
        place = None

        def make_room(layer_bytes: Sequence[int]) -> HostPlace | None:
            nonlocal place
            room = self.memory.registrations.begin(layer_bytes)
            self.host.evict(room.evictions)
            place = room.place
            return place

        adapter = self.host.register(path, make_room)
        if place is not None:
            self.memory.registrations.end(place.place_id, adapter.digest)
        return AdapterFacts(
            adapter.digest,
            adapter.rank,
            adapter.num_bytes,
            host_bytes=adapter.host_bytes,
            run_pages=adapter.run_pages,
        )

    def _check_host(self) -> None:
        """Check the account against the arena, except contents to be read or evicted."""
        check_invariants(self.host.arena)
        cache = self.memory.host
        assert cache is not None
        if not cache.has_evictions:
            assert self.host.arena.place_ids <= cache.place_ids
            assert self.host.arena.taken_bytes <= cache.taken_bytes
        if not len(self.memory.transfers):
            assert self.host.arena.num_references == 0
            assert cache.num_used == 0
            assert self.host.arena.place_ids >= cache.place_ids


def _open(path: AdapterPath) -> OpenAdapter:
    return open_adapter(Path(str(path)), _target_map(), max_rank=_MAX_RANK)
