"""Measures the engine's own time around steps, during which the device computes nothing.

This is a turn, which plans a step and applies its results; and beside it the cost of a new request
and of a new load. Measured between real steps, because a step displaces the turn's data from the
caches.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Self

from ....profiles.curve import median
from ....profiles.models import MachineModel
from ....profiles.profile import ProfileError
from ...adapter import AdapterFacts, AdapterLayers
from ...adapters.content import AdapterContent
from ...adapters.digest import ContentDigest
from ...adapters.registry import AdapterRegistry
from ...adapters.resolved import FileHeader, RawTensor, ResolvedAdapter, TakeTensors, TargetLora
from ...coldstart.cold_start import PlannedColdStarts
from ...coldstart.link import group_of_layers
from ...coldstart.planner import Planner, PlannerConfig
from ...coldstart.strategy import LoadStrategy
from ...memory.host_cache import HostCache
from ...memory.make import MemorySizes, make_device_memory
from ...memory.reload_cost import ReloadCosts
from ...plan import AdapterId, AdapterTransfer, Executor, HostPlace, Result, StepPlan
from ...sampling import SamplingParams
from ...scheduler.limits import SchedulerConfig
from ...scheduler.policy import PolicyFacts
from ...scheduler.registry import make_policy
from ...scheduler.scheduler import Scheduler
from ...scheduler.step_times import ProfiledTimes
from ..core import CoreConfig, EngineCore
from ..messages import AddRequest

if TYPE_CHECKING:
    from ....gpu.adapters.arrival import AdapterLoad
    from ....gpu.adapters.copier import DevicePages
    from ....gpu.adapters.host import HostAdapters
    from ....gpu.device.host_memory import TorchDevice
    from ....gpu.execution.assemble import LoadedModel
    from ...adapters.target_map import Target, TargetMap

_FEW_ROWS, _MANY_ROWS = 1, 8
_NUM_TURNS = 32  # for each number of rows
_NUM_REQUESTS = 15  # with the adapter on the device, and the same number without
_PROMPT_TOKENS = 8
_MAX_TOKEN_ID = 250  # of any vocabulary
_TIMEOUT_S = 60.0  # for all turns with one number of rows
_ADAPTER = "made up"
_RANK = 8  # the time of its copy does not matter
_ARENA_ADAPTERS = 8  # of its size: on the host its layers are in whole pages


_TYPE, _ITEM_BYTES = "BF16", 2


class MadeUpAdapter:
    """See the module; an ``AdapterReader``."""

    def __init__(self, target_map: "TargetMap", rank: int) -> None:
        self.adapter = ResolvedAdapter(tuple(_lora(one, rank) for one in target_map.inside))
        self.outline = self.adapter
        self.digest = ContentDigest(b"made up", ())

    def expect(self, digest: ContentDigest) -> None:
        assert digest == self.digest, "there is only one content"

    def begin(self) -> None:
        """See ``AdapterReader``: it is registered as a whole."""

    def resume(self, header: FileHeader) -> None:
        """See ``AdapterReader``."""
        raise AssertionError("it is registered as a whole")

    def read_layers(self, take: TakeTensors) -> Iterator[int]:
        by_layer = sorted(self.adapter.targets, key=lambda lora: lora.target.layer)
        for layer, loras in groupby(by_layer, key=lambda lora: lora.target.layer):
            for lora in loras:
                take([(raw, memoryview(bytearray(raw.num_bytes))) for raw in (lora.a, lora.b)])
            yield layer

    def close(self) -> None:
        """There is no file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _lora(target: "Target", rank: int) -> TargetLora:
    a = _tensor(f"{target.path}.a", (rank, target.in_features))
    b = _tensor(f"{target.path}.b", (target.out_features, rank))
    return TargetLora(target, a, b, rank, 1.0)


def _tensor(name: str, shape: tuple[int, int]) -> RawTensor:
    return RawTensor(name, _TYPE, shape, 0, _ITEM_BYTES * shape[0] * shape[1])


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Seconds; see ``MachineModel``."""

    turn_s: float
    row_s: float
    request_s: float
    load_s: float


def measure_turns(
    loaded: "LoadedModel", device: "TorchDevice", model: MachineModel, min_group_bytes: int
) -> TurnTimes:
    """Measure turns, without the time in which the device computes.

    Args:
        loaded: The model.
        device: Without enqueued operations; the caller keeps it.
        model: The latency model so far, with which the engine plans.
        min_group_bytes: Of a group of layers that are copied together.

    Raises ``ProfileError`` if a step or a load fails.
    """
    with contextlib.ExitStack() as undo:
        bench = _Bench(loaded, device, model, min_group_bytes, undo)
        few_s, many_s = (bench.turn_s(rows) for rows in (_FEW_ROWS, _MANY_ROWS))
        bench.register()
        bench.request_s()  # makes what is made once
        warm_s, cold_s = [], []
        for _ in range(_NUM_REQUESTS):
            warm_s.append(bench.request_s())
            bench.evict()
            cold_s.append(bench.request_s())
    row_s = max(0.0, many_s - few_s) / (_MANY_ROWS - _FEW_ROWS)
    request_s = median(warm_s)
    return TurnTimes(
        turn_s=max(0.0, few_s - row_s * _FEW_ROWS),
        row_s=row_s,
        request_s=max(0.0, request_s - few_s),
        load_s=max(0.0, median(cold_s) - request_s),
    )


class _Watched:
    """An executor, and the seconds that it took for rows or for waiting."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.inside_s = 0.0

    def submit(self, plan: StepPlan) -> None:
        start_s = time.perf_counter()
        self._executor.submit(plan)
        if plan.sub_batches:  # a load alone begins while nothing is computed
            self.inside_s += time.perf_counter() - start_s

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        start_s = time.perf_counter()
        results = self._executor.poll(timeout_s)
        self.inside_s += time.perf_counter() - start_s
        return results

    def fileno(self) -> int:
        return self._executor.fileno()

    def close(self) -> None:
        self._executor.close()


class _Bench:
    """An engine's core with the default policies, over real steps."""

    def __init__(
        self,
        loaded: "LoadedModel",
        device: "TorchDevice",
        model: MachineModel,
        min_group_bytes: int,
        undo: contextlib.ExitStack,
    ) -> None:
        """``undo`` closes it."""
        from ....gpu.execution import assemble
        from ....gpu.execution.executor import AdapterFetch
        from ....gpu.execution.sampler import Sampler

        ids = itertools.count(1)
        self._registry = AdapterRegistry(lambda: AdapterId(next(ids)))
        self._request_ids = itertools.count(1)
        block_size = loaded.layout.block_size
        context_tokens = _PROMPT_TOKENS + 2 * _NUM_TURNS
        num_blocks = _MANY_ROWS * (1 + -(-context_tokens // block_size))
        adapter_bytes = MadeUpAdapter(loaded.target_map, _RANK).adapter.num_bytes(loaded.dtype.itemsize)
        arena_bytes = _ARENA_ADAPTERS * adapter_bytes
        sizes = _memory_sizes(loaded, num_blocks, arena_bytes, context_tokens)
        num_pages = sizes.capacity_bytes // sizes.block_bytes if sizes.has_pages else None
        runner = assemble.make_runner(loaded, num_pages or num_blocks)
        pages = None if num_pages is None else assemble.device_pages(runner, _RANK)
        self._host = _make_host(loaded, device, min_group_bytes, arena_bytes, pages)
        undo.callback(self._host.close)
        executor = assemble.make_executor(
            loaded,
            runner,
            AdapterFetch(self._fetch, self._host.evict),
            Sampler(()),
            max_model_len=context_tokens,
        )
        undo.callback(executor.close)
        self._executor = _Watched(executor)
        scheduler = _scheduler(loaded, sizes, self._host.arena.capacity_bytes, model)
        self._core = EngineCore(
            scheduler,
            self._executor,
            self._registry,
            CoreConfig(base_fingerprint="", dtype=str(loaded.dtype)),
            clock=time.monotonic,
        )

    def turn_s(self, num_rows: int) -> float:
        """Return the time of a turn with ``num_rows`` decode rows, between idle phases."""
        self._add(num_rows, _NUM_TURNS + 2)
        return median(self._turns_s()[1:-1])  # the first turn has the prompts, the last ends all

    def register(self) -> None:
        """Register the adapter, which is in the host's memory."""
        place: HostPlace | None = None

        def make_room(layer_bytes: Sequence[int]) -> HostPlace | None:
            nonlocal place
            place = self._core.place_registration(layer_bytes).place
            return place

        adapter = self._host.register(_ADAPTER, make_room)
        assert place is not None and adapter.is_kept, "the arena was made for it"
        self._core.end_registration(place.place_id, adapter.digest)
        layers = AdapterLayers(adapter.rank_sums, adapter.group_bytes, adapter.group_of_layer)
        facts = AdapterFacts(
            adapter.digest,
            adapter.rank,
            adapter.num_bytes,
            host_bytes=adapter.host_bytes,
            layers=layers,
            run_pages=adapter.run_pages,
        )
        load_id = self._registry.begin_loading(_ADAPTER, _ADAPTER)
        self._registry.ready(_ADAPTER, _ADAPTER, load_id, AdapterContent(facts))

    def request_s(self) -> float:
        """Return the time of a request of one token, from arrival to end, with its load."""
        start_s = time.perf_counter()
        self._add(1, 1, _ADAPTER)
        return time.perf_counter() - start_s + sum(self._turns_s())

    def evict(self) -> None:
        """Take the adapter off the device."""
        assert self._core.evict_adapter(_ADAPTER), "nothing uses it"
        self._turns_s()

    def _add(self, number: int, max_tokens: int, adapter: str | None = None) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        for request_id in itertools.islice(self._request_ids, number):
            # Tokens of no earlier request, so that no KV is found.
            prompt = (request_id % _MAX_TOKEN_ID,) * _PROMPT_TOKENS
            self._core.add_request(AddRequest(request_id, prompt, sampling, adapter))

    def _turns_s(self) -> list[float]:
        """Return the seconds of each turn until the core is idle, without the executor's."""
        core, executor = self._core, self._executor
        turns_s = []
        deadline_s = time.monotonic() + _TIMEOUT_S
        while core.has_work:
            start_s, inside_s = time.perf_counter(), executor.inside_s
            updates = core.step(_TIMEOUT_S)
            turns_s.append(time.perf_counter() - start_s - (executor.inside_s - inside_s))
            failed = [update.error for update in updates if update.error is not None]
            if failed or time.monotonic() > deadline_s:
                reason = failed[0] if failed else f"steps do not end within {_TIMEOUT_S:g} s"
                raise ProfileError(f"cannot measure the engine's turns: {reason}")
        return turns_s

    def _fetch(self, transfer: AdapterTransfer) -> "AdapterLoad":
        assert transfer.host is not None, transfer
        version = self._registry.version(transfer.adapter_id)
        return self._host.fetch(version.digest, version.path, transfer.host)


def _make_host(
    loaded: "LoadedModel",
    device: "TorchDevice",
    min_group_bytes: int,
    arena_bytes: int,
    pages: "DevicePages | None",
) -> "HostAdapters":
    from ....gpu.adapters.host import ArenaSize, HostAdapters

    return HostAdapters(
        device,
        loaded.lora_backend,
        loaded.dtype,
        loaded.model.device,
        loaded.target_map,
        ArenaSize(arena_bytes, is_elastic=False, pages=pages),
        lambda _: MadeUpAdapter(loaded.target_map, _RANK),
        lambda layer_bytes: group_of_layers(layer_bytes, min_group_bytes),
    )


def _memory_sizes(
    loaded: "LoadedModel", num_blocks: int, adapter_bytes: int, context_tokens: int
) -> MemorySizes:
    layout = loaded.layout
    has_pages = loaded.model.device.type == "cuda"
    if has_pages:
        adapter_bytes = -(-adapter_bytes // layout.block_bytes) * layout.block_bytes
    return MemorySizes(
        capacity_bytes=num_blocks * layout.block_bytes + adapter_bytes,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        max_model_len=context_tokens,
        has_pages=has_pages,
    )


def _scheduler(loaded: "LoadedModel", sizes: MemorySizes, arena_bytes: int, model: MachineModel) -> Scheduler:
    """Make a scheduler with the default policies that plans with ``model``."""
    config = SchedulerConfig(
        max_num_batched_tokens=_MANY_ROWS * _PROMPT_TOKENS,
        max_num_seqs=_MANY_ROWS,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
    )
    times = ProfiledTimes(model, config.max_num_batched_tokens)
    costs = ReloadCosts(times, sizes.block_size, config.max_num_batched_tokens, model.link, is_assisted=False)
    facts = PolicyFacts(
        times=times,
        capacity_tokens=sizes.num_blocks * sizes.block_size,
        bytes_per_token=sizes.block_bytes / sizes.block_size,
    )
    memory = make_device_memory(sizes, "corun", costs, HostCache(arena_bytes))
    # A request that begins before its load has ended would be computed beside it.
    planner = Planner(model, PlannerConfig(forced=LoadStrategy.ASYNC_LOAD))
    cold_starts = PlannedColdStarts(planner, (0,), memory.transfers)
    return Scheduler(config, make_policy("corun", facts), memory, (), cold_starts, times=times)
