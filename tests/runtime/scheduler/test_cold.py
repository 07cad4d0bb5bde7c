"""Requests that start while their adapter is being loaded, as the scheduler plans them."""

from mmap import PAGESIZE

import pytest
from corun.runtime.adapter import AdapterFacts, AdapterLayers
from corun.runtime.memory.adapter_cache import AdapterState
from corun.runtime.memory.host_cache import HostCache
from corun.runtime.plan import (
    AdapterId,
    RequestId,
    StepId,
    StepPlan,
    SubBatchKind,
    TransferRead,
    TransferResult,
)
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk, ColdStarts, StepRows
from corun.runtime.scheduler.events import AdapterStart
from support.invariants import check_invariants
from support.scheduling import loads_of, make_executor, make_memory, make_request, make_scheduler

ADAPTER = AdapterId(7)


class FixedColdStarts(ColdStarts):
    """Starts every cold request, in chunks of 4 tokens, with a split of 2."""

    file_bytes_per_s = 1e6

    def __init__(self) -> None:
        self.log: list[str] = []
        self.chunk: ColdChunk | None = ColdChunk(4, 2)
        self.is_blocking = False
        self.closed: StepRows | None = None
        self.num_ended_steps = 0

    def workers_changed(self, num_ready: int) -> None:
        self.log.append(f"{num_ready} workers")

    def files_read(self, num_bytes: int, duration_s: float) -> None:
        self.log.append(f"{num_bytes} bytes in {duration_s} s")

    def may_start(self, request: Request, num_others: int, rows: StepRows, now_s: float) -> bool:
        return not self.is_blocking

    def waits(self, request: Request) -> None:
        self.log.append(f"{request.request_id} waits")

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        if self.chunk is None:
            return None
        return ColdChunk(min(self.chunk.num_tokens, request.num_pending_tokens, max_tokens), 2)

    def step_closed(self, step_id: StepId, rows: StepRows, now_s: float) -> None:
        self.closed = rows

    def step_ended(self, step_id: StepId, now_s: float) -> None:
        self.num_ended_steps += 1

    def blocks_all_requests(self) -> bool:
        return self.is_blocking

    def on_first_token(self, request_id: RequestId, now_s: float) -> AdapterStart:
        self.log.append(f"first token of {request_id}")
        return AdapterStart("assisted", "told to")

    def counts(self) -> dict[str, int]:
        return {"assisted": 1}

    def discard(self, request_id: RequestId) -> None:
        self.log.append(f"forgot {request_id}")


def test_a_cold_request_starts_with_its_load_and_ends_warm() -> None:
    cold_starts = FixedColdStarts()
    scheduler = make_scheduler(cold_starts=cold_starts)
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1, prompt=6, max_tokens=3, adapter_id=ADAPTER, adapter_bytes=100), 0.0)

    kinds, groups = [], []
    for turn in range(4):
        plan = scheduler.schedule(float(turn))
        assert plan is not None
        load = scheduler.memory.transfers.load_of(ADAPTER)
        groups.append(None if load is None else load.num_arrived)
        executor.submit(plan)
        kinds.append((plan.sub_batches[0].kind, plan.sub_batches[0].num_tokens))
        if turn == 1:
            executor.progress_transfer(1, 1)
        if turn == 2:
            executor.finish_transfer(1)
        executor.finish_step()
        for result in executor.poll():
            scheduler.update(result, float(turn))
    assert kinds == [
        (SubBatchKind.ASSISTED, (4,)),
        (SubBatchKind.ASSISTED, (2,)),
        (SubBatchKind.ASSISTED, (1,)),  # decoding while it is still loading
        (SubBatchKind.DECODE, (1,)),
    ]
    assert loads_of(executor.plans[0])[0].adapter_id == ADAPTER
    assert executor.plans[0].sub_batches[0].split_layers == (2,)
    assert groups == [0, 0, 1, None]
    assert cold_starts.log == ["first token of 1", "forgot 1"]
    assert cold_starts.num_ended_steps == 4


def step_beside_a_cold_request(
    *, mix: bool, second_prompt: int, separate_assisted_rows: bool = False
) -> tuple[StepPlan, StepRows]:
    """The step in which a cold request joins a decoding one, and perhaps a warm prompt."""
    cold_starts = FixedColdStarts()
    scheduler = make_scheduler(
        cold_starts=cold_starts, mix_decode_with_prefill=mix, separate_assisted_rows=separate_assisted_rows
    )
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    executor.finish_step()
    for result in executor.poll():
        scheduler.update(result, 0.0)
    scheduler.add_request(make_request(2, adapter_id=ADAPTER, adapter_bytes=100), 0.0)
    if second_prompt:
        scheduler.add_request(make_request(3, prompt=second_prompt), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    assert cold_starts.closed is not None
    return plan, cold_starts.closed


def test_cold_rows_share_a_forward_with_all_others() -> None:
    plan, rows = step_beside_a_cold_request(mix=True, second_prompt=6)
    (batch,) = plan.sub_batches
    assert batch.kind is SubBatchKind.ASSISTED
    assert (batch.request_ids, batch.num_tokens) == ((1, 3, 2), (1, 6, 4))  # by adapter
    assert batch.split_layers == (0, 0, 2)
    assert batch.samples == (True, True, False)
    assert [request.request_id for request in rows.decodes] == [1]
    assert [(request.request_id, number) for request, number in rows.chunks] == [(3, 6)]
    assert [(request.request_id, chunk) for request, chunk in rows.cold_chunks] == [(2, ColdChunk(4, 2))]


def test_rows_that_decode_may_have_a_forward_of_their_own() -> None:
    plan, rows = step_beside_a_cold_request(mix=False, second_prompt=6)
    decode, assisted = plan.sub_batches
    assert (decode.kind, decode.request_ids) == (SubBatchKind.DECODE, (1,))
    assert (assisted.kind, assisted.request_ids) == (SubBatchKind.ASSISTED, (3, 2))
    assert assisted.split_layers == (0, 2)
    assert rows.is_decode_separate


@pytest.mark.parametrize("second_prompt", [0, 6])
def test_on_a_gpu_warm_rows_share_a_forward_and_cold_rows_have_their_own(second_prompt: int) -> None:
    plan, rows = step_beside_a_cold_request(
        mix=True, second_prompt=second_prompt, separate_assisted_rows=True
    )
    warm, assisted = plan.sub_batches
    if second_prompt:
        assert (warm.kind, warm.request_ids) == (SubBatchKind.MIXED, (1, 3))
    else:
        assert (warm.kind, warm.request_ids) == (SubBatchKind.DECODE, (1,))
    assert (assisted.kind, assisted.request_ids) == (SubBatchKind.ASSISTED, (2,))
    assert assisted.split_layers == (2,)
    assert rows.is_cold_separate


def test_others_go_on_while_a_cold_request_skips_steps() -> None:
    cold_starts = FixedColdStarts()
    cold_starts.chunk = None
    scheduler = make_scheduler(cold_starts=cold_starts)
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1), 0.0)
    scheduler.add_request(make_request(2, adapter_id=ADAPTER, adapter_bytes=100), 0.0)
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        assert [batch.request_ids for batch in plan.sub_batches] == [(1,)]
        executor.submit(plan)
        executor.finish_step()
        for result in executor.poll():
            scheduler.update(result, 0.0)


def test_a_blocking_load_stops_everybody() -> None:
    cold_starts = FixedColdStarts()
    scheduler = make_scheduler(cold_starts=cold_starts)
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    executor.finish_step()
    for result in executor.poll():
        scheduler.update(result, 0.0)
    cold_starts.is_blocking = True
    scheduler.add_request(make_request(2, adapter_id=ADAPTER, adapter_bytes=100), 0.0)
    assert scheduler.schedule(0.0) is None


def test_a_prefetch_that_somebody_waits_for_is_promoted() -> None:
    cold_starts = FixedColdStarts()
    scheduler = make_scheduler(cold_starts=cold_starts, max_num_seqs=1)
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1, max_tokens=1), 0.0)
    scheduler.add_request(make_request(2, adapter_id=ADAPTER, adapter_bytes=100), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [transfer.is_demand for transfer in plan.transfers] == [False]
    load = scheduler.memory.transfers.load_of(ADAPTER)
    assert load is not None and not load.is_demand
    executor.submit(plan)
    executor.finish_step()
    for result in executor.poll():
        scheduler.update(result, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.promoted_transfers == plan.load_order == (1,)
    assert load.is_demand
    scheduler.fail_step(plan.step_id, "lost", 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.promoted_transfers == plan.load_order == (1,), "as the plan with it was lost"
    scheduler.update(TransferResult(load.transfer_id), 0.0)
    scheduler.fail_step(plan.step_id, "lost", 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is None or not plan.promoted_transfers, "it has ended"


def test_a_request_without_room_for_a_cold_row_is_known_to_wait() -> None:
    cold_starts = FixedColdStarts()
    scheduler = make_scheduler(cold_starts=cold_starts, max_assisted_rows_per_step=1)
    for number in (1, 2):
        adapter_id = AdapterId(number)
        scheduler.add_request(make_request(number, adapter_id=adapter_id, adapter_bytes=100), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert cold_starts.log == ["2 waits"]


def test_cold_starts_learn_what_was_read_from_files_and_only_once() -> None:
    cold_starts = FixedColdStarts()
    memory = make_memory(host=HostCache(PAGESIZE))
    scheduler = make_scheduler(cold_starts=cold_starts, memory=memory)
    layers = AdapterLayers(((8,),) * 2, group_bytes=(60, 40), group_of_layer=(0, 1))
    adapter = AdapterFacts("content", 8, 100, host_bytes=(PAGESIZE,), layers=layers)
    scheduler.add_request(make_request(1, adapter_id=ADAPTER, adapter=adapter), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    (load,) = loads_of(plan)
    for num_groups, duration_s in ((1, 0.25), (1, 0.25), (2, 0.75)):
        scheduler.update(TransferRead(load.transfer_id, num_groups, duration_s), 1.0)
    scheduler.update(TransferResult(load.transfer_id), 1.0)
    scheduler.update(TransferRead(load.transfer_id, 2, 1.0), 1.0)
    news = [entry for entry in cold_starts.log if "bytes" in entry]
    assert news == ["60 bytes in 0.25 s", "0 bytes in 0.0 s", "40 bytes in 0.5 s", "0 bytes in 0.0 s"]


def test_a_failed_load_ends_its_requests_and_frees_its_bytes_with_the_last_step() -> None:
    memory = make_memory(num_blocks=16)
    scheduler = make_scheduler(cold_starts=FixedColdStarts(), memory=memory)
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1, prompt=8, adapter_id=ADAPTER, adapter_bytes=100), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    executor.submit(plan)
    executor.finish_transfer(1, "no such file")
    events = [event for result in executor.poll() for event in scheduler.update(result, 0.0)]
    assert [event.error_kind for event in events] == ["AdapterUnavailableError"]
    assert memory.cache.state(ADAPTER) is AdapterState.LOADING  # a step in flight refers to it
    check_invariants(scheduler)
    executor.finish_step()
    for result in executor.poll():
        scheduler.update(result, 0.0)
    assert memory.cache.state(ADAPTER) is AdapterState.ABSENT
    assert memory.budget.free_bytes == memory.budget.capacity_bytes
