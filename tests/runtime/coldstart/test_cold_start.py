"""Cold starts from arrival to first token, with the real planner and made-up times."""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from corun.cpu_workers.teams import JobModel
from corun.profiles.curve import Curve
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.runtime.adapter import AdapterFacts, AdapterLayers
from corun.runtime.coldstart.cold import ColdRequest
from corun.runtime.coldstart.cold_start import PlannedColdStarts
from corun.runtime.coldstart.link import LinkForecast, by_layer
from corun.runtime.coldstart.planner import Planner, PlannerConfig
from corun.runtime.coldstart.predict import Start, choose_start
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.plan import AdapterId, RequestId, StepId
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk, StepRows
from hypothesis import given, settings
from support.open_transfers import Loads
from support.scheduling import make_request

ADAPTER = AdapterId(1)
_LAYERS = 4


def _model(link_bytes_per_s: float, invocation_s: float = 0.00002) -> MachineModel:
    """4 ms per token and step, 0.2 ms per token and group for the workers."""
    curve = Curve((1.0, 101.0), (0.001, 0.101))
    return MachineModel(
        num_layers=_LAYERS,
        step_s=Curve((1.0, 101.0), (0.004, 0.404)),
        groups=(GroupModel("q_proj", curve, 1 / 8),),
        invocation_s=invocation_s,
        lora=LoraModel(0.0, 0.0, 0.0, 0.0),
        link=LinkModel(link_bytes_per_s, 0.0),
        num_workers=1,
        job=JobModel(s_per_product=0.0002),
    )


def _cold_starts(
    loads: Loads,
    *,
    link_bytes_per_s: float = 1000.0,
    num_workers: int = 1,
    forced: LoadStrategy | None = None,
    max_worker_tokens: int = 512,
    invocation_s: float = 0.00002,
    priority: float = 1.0,
    max_stall_share: float | None = None,
) -> PlannedColdStarts:
    config = PlannerConfig(forced=forced, priority=priority, max_stall_share=max_stall_share)
    cold_starts = PlannedColdStarts(
        Planner(_model(link_bytes_per_s, invocation_s), config),
        tuple(max_worker_tokens * number for number in range(num_workers + 1)),
        loads.table,
    )
    cold_starts.workers_changed(num_workers)
    return cold_starts


_FACTS = AdapterFacts(
    "d", 8, 400, layers=AdapterLayers(((8,),) * _LAYERS, group_bytes=(200, 200), group_of_layer=(0, 0, 1, 1))
)


@pytest.fixture
def loads() -> Loads:
    return Loads()


def _load(loads: Loads, now_s: float = 0.0, adapter_id: AdapterId = ADAPTER) -> None:
    """Begin to load an adapter from host memory."""
    loads.begin(adapter_id, (200, 200), now_s, adapter=_FACTS)


def _arrive(cold_starts: PlannedColdStarts, loads: Loads, number: int) -> list[Request]:
    """Requests of 32 tokens for an adapter that begins to load."""
    _load(loads)
    requests = [make_request(n + 1, prompt=32, adapter_id=ADAPTER) for n in range(number)]
    for request in requests:
        assert cold_starts.may_start(request, 0, _rows(), 0.0)
    return requests


def _predicted_s(cold_starts: PlannedColdStarts, loads: Loads) -> float:
    """Return the predicted first token of another such request."""
    if loads.table.load_of(ADAPTER) is not None:
        loads.end(ADAPTER)
    _load(loads)
    request = make_request(50, prompt=32, adapter_id=ADAPTER)
    cold_starts.may_start(request, 0, _rows(), 0.0)
    decision = cold_starts.decision(request.request_id)
    assert decision is not None
    return decision.predictions[0].first_token_s


def _rows(num_decodes: int = 0, *, is_decode_separate: bool = False) -> StepRows:
    """Return a step with this number of decode rows so far."""
    decodes = [make_request(100 + number) for number in range(num_decodes)]
    return StepRows(64, is_decode_separate, decodes)


def test_workers_start_what_the_link_would_hold_up(loads: Loads) -> None:
    cold_starts = _cold_starts(loads)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    _load(loads)
    assert cold_starts.may_start(request, 0, _rows(), 0.0)
    decision = cold_starts.decision(RequestId(1))
    assert decision is not None
    assert decision.strategy is LoadStrategy.ASSISTED
    chunk = cold_starts.next_chunk(request, 512, 0, _rows(), 0.0)
    assert chunk is not None
    assert (chunk.num_tokens, chunk.split_layer) == (32, _LAYERS)


def test_the_first_step_predicts_nothing_that_its_decision_has_predicted(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[LoadStrategy] = []

    def count(model: MachineModel, request: ColdRequest, *arguments: Any, **options: Any) -> Start:
        start = choose_start(model, request, *arguments, **options)
        predicted.append(arguments[2])
        return start

    monkeypatch.setattr("corun.runtime.coldstart.planner.choose_start", count)
    cold_starts = _cold_starts(loads)
    request = make_request(1, prompt=32, adapter_id=ADAPTER)
    _load(loads)
    assert cold_starts.may_start(request, 0, _rows(), 0.0)
    num_predicted = len(predicted)
    assert cold_starts.next_chunk(request, 512, 0, _rows(), 0.0) is not None
    assert len(predicted) == num_predicted == len(set(predicted))
    # More of the load has arrived, or other rows have joined.
    assert cold_starts.next_chunk(request, 512, 0, _rows(), 0.01) is not None
    assert cold_starts.next_chunk(request, 512, 0, _rows(2), 0.01) is not None
    assert predicted[num_predicted:] == [LoadStrategy.ASSISTED] * 2


def test_a_load_that_workers_can_serve_meanwhile_waits(loads: Loads) -> None:
    """Unless a step has begun that needs it."""
    cold_starts = _cold_starts(loads)
    assert _FACTS.layers is not None
    with_factors = replace(_FACTS, layers=replace(_FACTS.layers, not_by_workers="DoRA"))
    _load(loads)
    loads.begin(2, (200, 200), adapter=with_factors)
    served, waiting = (make_request(number, prompt=32, adapter_id=AdapterId(number)) for number in (1, 2))
    for request in (served, waiting):
        cold_starts.may_start(request, 0, _rows(), 0.0)
    cold_starts.step_closed(StepId(1), _rows(), 0.0)
    first, second = (loads[number].transfer_id for number in (2, 1))
    assert loads.table.take_order() == (first, second)
    rows = _rows()
    rows.cold_chunks.append((served, ColdChunk(32, _LAYERS)))
    cold_starts.step_closed(StepId(2), rows, 0.0)
    assert loads.table.take_order() == (), "workers compute all of it"
    rows.cold_chunks[0] = served, ColdChunk(32, 1)
    cold_starts.step_closed(StepId(3), rows, 0.0)
    assert loads.table.take_order() == (second, first)


def test_a_load_whose_request_waits_for_all_of_it_goes_first(loads: Loads) -> None:
    """Until its first token: without a decision for lack of room, or after a failure of workers."""
    cold_starts = _cold_starts(loads)
    first, second = (make_request(number, prompt=32, adapter_id=AdapterId(number)) for number in (1, 2))
    ids = []
    for request in (first, second):
        _load(loads, adapter_id=request.adapter_id)
        ids.append(loads[request.adapter_id].transfer_id)

    def order(step: int) -> tuple[int, ...]:
        cold_starts.step_closed(StepId(step), _rows(), 0.0)
        return tuple(ids.index(one) + 1 for one in loads.table.take_order())

    assert cold_starts.may_start(first, 0, _rows(), 0.0)
    cold_starts.waits(first)  # for the next step: it has a decision
    cold_starts.waits(second)
    assert order(1) == (2, 1)
    first.retried_positions[0] += 2
    assert cold_starts.next_chunk(first, 32, 0, _rows(), 0.0) is None
    assert cold_starts.may_start(second, 0, _rows(), 0.0)
    assert order(2) == (1, 2)
    second.retried_positions[0] += 1
    assert not cold_starts.may_start(second, 0, _rows(), 0.0)
    assert order(3) == (), "both wait"
    cold_starts.on_first_token(first.request_id, 0.0)
    assert order(4) == (2, 1)


def test_a_request_that_waits_by_decision_loses_each_second_though_workers_could_serve_it(
    loads: Loads,
) -> None:
    cold_starts = _cold_starts(loads)
    planner = Planner(_model(1000.0, invocation_s=0.02))
    for _ in range(3):
        for strategy in (LoadStrategy.ASSISTED, LoadStrategy.PIPELINED):
            planner.observe(strategy, 1.0, 2.5)
    cold_starts.set_planner(planner)
    waiting, other = (make_request(number, prompt=32, adapter_id=AdapterId(number)) for number in (1, 2))
    for request in (waiting, other):
        _load(loads, adapter_id=request.adapter_id)
    assert not cold_starts.may_start(waiting, 5, _rows(5), 0.0)
    cold_starts.waits(other)
    cold_starts.step_closed(StepId(1), _rows(5), 0.0)
    assert loads.table.take_order() == ()


def test_adapters_with_factors_do_not_use_workers(loads: Loads) -> None:
    cold_starts = _cold_starts(loads)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    assert _FACTS.layers is not None
    facts = replace(_FACTS, layers=replace(_FACTS.layers, not_by_workers="DoRA"))
    loads.begin(ADAPTER, (200, 200), 0.0, adapter=facts)
    assert cold_starts.may_start(request, 0, _rows(), 0.0)
    decision = cold_starts.decision(RequestId(1))
    assert decision is not None
    assert decision.strategy is LoadStrategy.PIPELINED
    assert "workers do not compute DoRA" in decision.reason
    chunk = cold_starts.next_chunk(request, 512, 0, _rows(), 0.0)
    assert chunk is None or chunk.split_layer == 0


def test_the_split_follows_what_has_arrived(loads: Loads) -> None:
    cold_starts = _cold_starts(loads)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    _load(loads)
    assert cold_starts.may_start(request, 0, _rows(), 0.0)
    loads.arrived(ADAPTER, 1, 0.05)
    chunk = cold_starts.next_chunk(request, 8, 0, _rows(), 0.05)
    assert chunk is not None
    assert chunk.split_layer == _LAYERS  # the second group is 200 ms away, the chunk takes 32
    loads.arrived(ADAPTER, 2, 0.06)
    chunk = cold_starts.next_chunk(request, 8, 0, _rows(), 0.06)
    assert chunk is not None
    assert chunk.split_layer == 0


def test_a_row_that_failed_runs_without_workers(loads: Loads) -> None:
    cold_starts = _cold_starts(loads)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    _load(loads)
    assert cold_starts.may_start(request, 0, _rows(), 0.0)
    request.retried_positions[0] += 1
    chunk = cold_starts.next_chunk(request, 512, 0, _rows(), 0.0)
    assert chunk is not None
    assert chunk.split_layer == 0
    assert not cold_starts.may_start(request, 0, _rows(), 0.0)  # if it was preempted meanwhile
    request.retried_positions[0] += 1
    assert cold_starts.next_chunk(request, 512, 0, _rows(), 0.0) is None  # it waits for the whole adapter


def test_nobody_waits_for_a_load_that_one_cold_row_needs(loads: Loads) -> None:
    cold_starts = _cold_starts(loads, num_workers=0, forced=LoadStrategy.PIPELINED)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    _load(loads)
    assert cold_starts.may_start(request, 3, _rows(3), 0.0)
    assert cold_starts.next_chunk(request, 512, 3, _rows(3), 0.0) is None  # 200 ms of waiting
    assert cold_starts.next_chunk(request, 512, 0, _rows(), 0.0) is not None
    loads.arrived(ADAPTER, 2, 0.1)
    assert cold_starts.next_chunk(request, 512, 3, _rows(3), 0.1) is not None


def test_a_chunk_is_no_larger_than_the_rings_of_the_ready_workers(loads: Loads) -> None:
    cold_starts = _cold_starts(loads, max_worker_tokens=24, forced=LoadStrategy.ASSISTED)
    first, second, third = _arrive(cold_starts, loads, 3)
    rows = _rows()
    chunk = cold_starts.next_chunk(first, 512, 0, rows, 0.0)
    assert chunk == ColdChunk(24, _LAYERS)
    rows.cold_chunks.append((first, ColdChunk(20, _LAYERS)))  # had it had fewer tokens
    chunk = cold_starts.next_chunk(second, 512, 0, rows, 0.0)
    assert chunk == ColdChunk(4, _LAYERS)
    rows.cold_chunks.append((second, chunk))
    chunk = cold_starts.next_chunk(third, 512, 0, rows, 0.0)
    assert chunk == ColdChunk(32, 0)  # the rings are full, so it waits for its layers


def test_a_step_bears_the_waits_of_all_its_rows_together(loads: Loads) -> None:
    """A chunk that one row may have may be too much beside that row."""
    cold_starts = _cold_starts(loads, invocation_s=0.0016, forced=LoadStrategy.ASSISTED, max_stall_share=0.05)
    first, second = _arrive(cold_starts, loads, 2)
    rows = _rows(4)
    chunk = cold_starts.next_chunk(first, 32, 5, rows, 0.0)
    assert chunk == ColdChunk(32, _LAYERS)
    rows.cold_chunks.append((first, chunk))
    assert cold_starts.next_chunk(second, 16, 5, rows, 0.0) is None
    rows.chunks.append((make_request(9, prompt=64), 64))  # which makes the step longer
    assert cold_starts.next_chunk(second, 16, 5, rows, 0.0) == ColdChunk(16, _LAYERS)


def test_rows_that_decode_make_a_chunk_bearable_wherever_they_are_computed() -> None:
    for is_decode_separate in (False, True):
        loads = Loads()
        cold_starts = _cold_starts(
            loads, invocation_s=0.0022, forced=LoadStrategy.ASSISTED, max_stall_share=0.05
        )
        (request,) = _arrive(cold_starts, loads, 1)
        few, many = (_rows(n, is_decode_separate=is_decode_separate) for n in (1, 16))
        assert cold_starts.next_chunk(request, 32, 1, few, 0.0) is None
        assert cold_starts.next_chunk(request, 32, 16, many, 0.0) is not None


@dataclass(frozen=True)
class _Crowd:
    """Cold requests of several adapters, warm rows, and arrivals of layer groups."""

    cold_starts: PlannedColdStarts
    rows: StepRows
    requests: list[Request]
    now_s: float
    model: MachineModel
    loads: Loads
    link: LinkForecast  # of the same loads
    max_worker_tokens: int  # of all workers together


@st.composite
def _crowds(draw: st.DrawFn, priority: float = 1.0, max_stall_share: float | None = None) -> _Crowd:
    forced = draw(st.sampled_from([LoadStrategy.ASSISTED, LoadStrategy.PIPELINED, None]))
    model = _model(draw(st.sampled_from([1e3, 1e4, 1e6])), draw(st.sampled_from([1e-5, 3e-4, 2e-3])))
    num_workers, max_worker_tokens = draw(st.integers(0, 3)), draw(st.sampled_from([8, 40, 512]))
    loads = Loads()
    cold_starts = _cold_starts(
        loads,
        link_bytes_per_s=model.link.bytes_per_s,
        invocation_s=model.invocation_s,
        num_workers=num_workers,
        max_worker_tokens=max_worker_tokens,
        forced=forced,
        priority=priority,
        max_stall_share=max_stall_share,
    )
    rows = _rows(draw(st.integers(0, 8)), is_decode_separate=draw(st.booleans()))
    link = LinkForecast(model.link, loads.table)
    requests = []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        adapter_id = AdapterId(number)
        _load(loads, adapter_id=adapter_id)
        if draw(st.booleans()):
            loads.arrived(adapter_id, 1, 0.0)
        prompt = draw(st.integers(1, 64))
        requests.append(make_request(number, prompt=prompt, adapter_id=adapter_id))
    now_s = draw(st.sampled_from([0.0, 0.02, 0.3]))
    return _Crowd(cold_starts, rows, requests, now_s, model, loads, link, num_workers * max_worker_tokens)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_crowds(max_stall_share=0.05))
def test_no_step_is_held_up_by_more_than_the_share(crowd: _Crowd) -> None:
    """With any rows: compare with a simulation layer by layer, as on a device."""
    wait_s, warm_s = _start_all(crowd)
    assert wait_s <= 0.05 * warm_s + 1e-9


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_crowds(priority=0.0))
def test_no_step_waits_for_cold_requests_of_no_priority(crowd: _Crowd) -> None:
    wait_s, _ = _start_all(crowd)
    assert wait_s <= 1e-6  # a millionth of the longest load


def _start_all(crowd: _Crowd) -> tuple[float, float]:
    """Start what may start beside five others. Return the step's wait, and its time without it."""
    cold_starts, rows, now_s = crowd.cold_starts, crowd.rows, crowd.now_s
    for request in crowd.requests:
        if cold_starts.may_start(request, 5, rows, now_s):
            chunk = cold_starts.next_chunk(request, 64, 5, rows, now_s)
            if chunk is not None:
                rows.cold_chunks.append((request, chunk))
    times_s = _run_step(crowd) if rows.cold_chunks else (0.0, 0.0)
    cold_starts.step_closed(StepId(1), rows, 0.0)
    return times_s


def _run_step(crowd: _Crowd) -> tuple[float, float]:
    """Return the wait of the step, and its time without waits."""
    rows = crowd.rows
    chunks = [chunk for _, chunk in rows.cold_chunks]
    ready_s = [
        by_layer((0, 0, 1, 1), crowd.link.ready_s(crowd.loads[request.adapter_id], crowd.now_s))
        for request, _ in rows.cold_chunks
    ]
    separate_s = 0.004 * len(rows.decodes) if rows.is_decode_separate else 0.0
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    num_tokens += 0 if rows.is_decode_separate else len(rows.decodes)
    end_s = separate_s
    for layer in range(_LAYERS):
        end_s = max([end_s, *(ready_s[n][layer] for n, c in enumerate(chunks) if c.split_layer <= layer)])
        end_s += num_tokens * 0.001
        helped = [chunk.num_tokens for chunk in chunks if chunk.split_layer > layer]
        # A fifth of the base products' time: never longer than these on one worker.
        end_s += len(helped) * crowd.model.invocation_s
        assert sum(helped) <= crowd.max_worker_tokens
    warm_s = separate_s + num_tokens * 0.004
    return end_s - warm_s, warm_s


def test_rows_that_join_later_are_no_fault_of_the_strategy(loads: Loads) -> None:
    """Another cold and a warm prompt join the step; the first token is as late as they make it."""
    cold_starts = _cold_starts(loads, forced=LoadStrategy.ASSISTED)
    request, other = _arrive(cold_starts, loads, 2)
    decision = cold_starts.decision(request.request_id)
    assert decision is not None
    alone_s = decision.predictions[0].first_token_s
    rows = _rows()
    chunk = cold_starts.next_chunk(request, 512, 1, rows, 0.0)
    assert chunk is not None
    rows.cold_chunks += [(request, chunk), (other, ColdChunk(32, _LAYERS))]
    rows.chunks.append((make_request(9, prompt=100), 100))
    cold_starts.step_closed(StepId(1), rows, 0.0)
    cold_starts.on_first_token(request.request_id, alone_s + 132 * 0.004)
    assert _predicted_s(cold_starts, loads) == pytest.approx(alone_s)


def test_steps_that_wait_longer_than_predicted_make_cold_chunks_rarer(loads: Loads) -> None:
    """Run ten steps beside three decode rows, each a fifth longer than without waits."""
    cold_starts = _cold_starts(loads, forced=LoadStrategy.ASSISTED, max_stall_share=0.05)
    (request,) = _arrive(cold_starts, loads, 1)
    now_s = 0.0
    for number in range(20):
        rows = _rows(3)
        if number % 2:
            chunk = cold_starts.next_chunk(request, 512, 3, rows, now_s)
            if chunk is None:
                break
            rows.cold_chunks.append((request, chunk))
        else:
            rows.chunks.append((make_request(9, prompt=32), 32))
        cold_starts.step_closed(StepId(number), rows, now_s)
        now_s += (3 + 32) * 0.004 * (1.2 if number % 2 else 1.0)
        cold_starts.step_ended(StepId(number), now_s)
    assert chunk is None and number > 1


def test_a_request_that_had_no_room_teaches_nothing(loads: Loads) -> None:
    cold_starts = _cold_starts(loads, forced=LoadStrategy.ASSISTED)
    (request,) = _arrive(cold_starts, loads, 1)
    cold_starts.step_closed(StepId(1), _rows(), 0.0)  # it was decided on, and not let in
    rows = _rows()
    chunk = cold_starts.next_chunk(request, 512, 0, rows, 5.0)
    assert chunk is not None
    rows.cold_chunks.append((request, chunk))
    cold_starts.step_closed(StepId(1), rows, 0.0)
    decision = cold_starts.decision(request.request_id)
    assert decision is not None
    alone_s = decision.predictions[0].first_token_s
    assert cold_starts.on_first_token(request.request_id, 5.1) is not None
    assert _predicted_s(cold_starts, loads) == alone_s


def test_a_request_that_skips_steps_for_its_load_teaches_that(loads: Loads) -> None:
    cold_starts = _cold_starts(loads, num_workers=0, forced=LoadStrategy.PIPELINED)
    (request,) = _arrive(cold_starts, loads, 1)
    assert cold_starts.next_chunk(request, 512, 3, _rows(3), 0.0) is None
    cold_starts.step_closed(StepId(1), _rows(3), 0.0)
    loads.end(ADAPTER, 0.4)  # from here on it is as warm as others
    cold_starts.step_closed(StepId(1), _rows(3), 0.0)
    decision = cold_starts.decision(request.request_id)
    assert decision is not None
    alone_s = decision.predictions[0].first_token_s
    cold_starts.on_first_token(request.request_id, 2.0)
    assert _predicted_s(cold_starts, loads) > 1.5 * alone_s


def test_blocking_stops_everybody_until_the_load_ends(loads: Loads) -> None:
    cold_starts = _cold_starts(loads, forced=LoadStrategy.BLOCKING)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    _load(loads)
    assert not cold_starts.may_start(request, 3, _rows(3), 0.0)
    assert cold_starts.blocks_all_requests()
    loads.end(ADAPTER, 0.4)
    assert not cold_starts.blocks_all_requests()


def test_what_is_unknown_waits(loads: Loads) -> None:
    cold_starts = _cold_starts(loads)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    assert not cold_starts.may_start(request, 0, _rows(), 0.0)
    _load(loads)
    assert cold_starts.may_start(request, 0, _rows(), 0.0)
    loads.end(ADAPTER, 0.1)  # failed: the request is about to end
    assert cold_starts.next_chunk(request, 512, 0, _rows(), 0.1) is None


def test_first_tokens_teach_the_planner_and_ends_are_forgotten(loads: Loads) -> None:
    cold_starts = _cold_starts(loads)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    _load(loads)
    cold_starts.may_start(request, 0, _rows(), 0.0)
    before = cold_starts.decision(RequestId(1))
    assert before is not None
    told = cold_starts.on_first_token(RequestId(1), 1.0)  # far later than predicted
    assert told is not None
    assert (told.strategy, told.reason) == ("assisted", before.reason)
    assert cold_starts.counts() == {"assisted": 1}
    cold_starts.discard(RequestId(1))
    assert cold_starts.decision(RequestId(1)) is None
    loads.end(ADAPTER, 1.0)
    _load(loads, 2.0)
    cold_starts.may_start(request, 0, _rows(), 2.0)
    after = cold_starts.decision(RequestId(1))
    assert after is not None
    times = [
        next(p for p in d.predictions if p.strategy is LoadStrategy.ASSISTED).first_token_s
        for d in (before, after)
    ]
    assert times[1] > 1.5 * times[0]


def test_another_planner_brings_its_own_link(loads: Loads) -> None:
    cold_starts = _cold_starts(loads)
    faster = Planner(_model(100_000.0), PlannerConfig(forced=LoadStrategy.PIPELINED))
    cold_starts.set_planner(faster)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    _load(loads)
    assert cold_starts.may_start(request, 0, _rows(), 0.0)
    decision = cold_starts.decision(RequestId(1))
    assert decision is not None
    assert decision.strategy is LoadStrategy.PIPELINED
    (prediction,) = decision.predictions
    assert prediction.first_token_s == pytest.approx(200 / 100_000.0 + 32 * 0.004)
    cold_starts.set_planner(Planner(_model(1000.0), faster.config))
    again = make_request(2, prompt=32, adapter_id=ADAPTER)
    assert cold_starts.may_start(again, 0, _rows(), 0.0)
    decision = cold_starts.decision(RequestId(2))
    assert decision is not None
    (prediction,) = decision.predictions  # what is under way moves over its link, too
    assert prediction.first_token_s == pytest.approx(2 * 200 / 1000.0 + 32 * 0.004 / 2)
