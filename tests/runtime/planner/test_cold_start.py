"""Cold starts from arrival to first token, with the real planner and made-up times."""

import pytest
from corun.profiles.curve import Curve, CurveFamily
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.runtime.plan import AdapterId, RequestId
from corun.runtime.planner.cold import AdapterShape
from corun.runtime.planner.cold_start import AdapterLayers, PlannedColdStarts
from corun.runtime.planner.planner import Planner, PlannerConfig
from corun.runtime.planner.strategy import LoadStrategy
from support.scheduling import make_request

ADAPTER = AdapterId(1)
_LAYERS = 4


def _model(link_bytes_per_s: float) -> MachineModel:
    """4 ms per token and step, 0.2 ms per token and group for the workers."""
    curve = Curve((1.0, 101.0), (0.001, 0.101))
    deltas = CurveFamily((8.0,), (Curve((1.0, 101.0), (0.0002, 0.0202)),))
    return MachineModel(
        num_layers=_LAYERS,
        step_s=Curve((1.0, 101.0), (0.004, 0.404)),
        groups=(GroupModel("q_proj", curve, deltas),),
        invocation_s=0.00002,
        lora=LoraModel(0.0, 0.0, 0.0, 0.0),
        link=LinkModel(link_bytes_per_s, 0.0),
        num_workers=1,
        tokens_per_worker=64,
    )


def _cold_starts(
    *,
    link_bytes_per_s: float = 1000.0,
    num_workers: int = 1,
    is_on_host: bool = True,
    forced: LoadStrategy | None = None,
) -> PlannedColdStarts:
    layers = AdapterLayers(
        shape=AdapterShape(400, ((8,),) * _LAYERS),
        group_bytes=(200, 200),
        group_of_layer=(0, 0, 1, 1),
        is_on_host=is_on_host,
    )
    return PlannedColdStarts(
        Planner(_model(link_bytes_per_s), PlannerConfig(forced=forced)),
        lambda adapter_id: layers,
        num_free_workers=lambda: num_workers,
        running_step_s=lambda: 0.004,
        max_chunk_tokens=64,
    )


def test_workers_start_what_the_link_would_hold_up() -> None:
    cold_starts = _cold_starts()
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    assert cold_starts.may_start(request, 0, 0.0)
    decision = cold_starts.decision(RequestId(1))
    assert decision is not None
    assert decision.strategy is LoadStrategy.ASSISTED
    chunk = cold_starts.next_chunk(request, 512, 0, 0.0)
    assert chunk is not None
    assert (chunk.num_tokens, chunk.split_layer) == (32, _LAYERS)


def test_the_split_follows_what_has_arrived() -> None:
    cold_starts = _cold_starts()
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    assert cold_starts.may_start(request, 0, 0.0)
    cold_starts.load_progressed(ADAPTER, 1, 0.05)
    chunk = cold_starts.next_chunk(request, 8, 0, 0.05)
    assert chunk is not None
    assert chunk.split_layer == _LAYERS  # the second group is 200 ms away, the chunk takes 32
    cold_starts.load_progressed(ADAPTER, 2, 0.06)
    chunk = cold_starts.next_chunk(request, 8, 0, 0.06)
    assert chunk is not None
    assert chunk.split_layer == 0


def test_files_must_have_been_read_first() -> None:
    cold_starts = _cold_starts(is_on_host=False)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    assert not cold_starts.may_start(request, 0, 0.0)
    told = cold_starts.first_token(RequestId(1), 9.0)  # late, and no fault of the workers
    assert told is not None
    assert told.strategy == "async_load"
    assert "files must be read first" in told.reason
    assert cold_starts.counts() == {"async_load": 1}


def test_a_row_that_failed_runs_without_workers() -> None:
    cold_starts = _cold_starts()
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    assert cold_starts.may_start(request, 0, 0.0)
    request.retried_positions[0] += 1
    chunk = cold_starts.next_chunk(request, 512, 0, 0.0)
    assert chunk is not None
    assert chunk.split_layer == 0
    assert not cold_starts.may_start(request, 0, 0.0)  # if it was preempted meanwhile
    request.retried_positions[0] += 1
    assert cold_starts.next_chunk(request, 512, 0, 0.0) is None  # it waits for the whole adapter


def test_nobody_waits_for_a_load_that_one_cold_row_needs() -> None:
    cold_starts = _cold_starts(num_workers=0, forced=LoadStrategy.PIPELINED)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    assert cold_starts.may_start(request, 3, 0.0)
    assert cold_starts.next_chunk(request, 512, 3, 0.0) is None  # 200 ms of waiting
    assert cold_starts.next_chunk(request, 512, 0, 0.0) is not None
    cold_starts.load_progressed(ADAPTER, 2, 0.1)
    assert cold_starts.next_chunk(request, 512, 3, 0.1) is not None


def test_blocking_stops_everybody_until_the_load_ends() -> None:
    cold_starts = _cold_starts(forced=LoadStrategy.BLOCKING)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    assert not cold_starts.may_start(request, 3, 0.0)
    assert cold_starts.stops_everybody()
    cold_starts.load_ended(ADAPTER, 0.4)
    assert not cold_starts.stops_everybody()


def test_what_is_unknown_waits() -> None:
    cold_starts = _cold_starts()
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    assert not cold_starts.may_start(request, 0, 0.0)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    assert cold_starts.may_start(request, 0, 0.0)
    cold_starts.load_ended(ADAPTER, 0.1)  # failed: the request is about to be told
    assert cold_starts.next_chunk(request, 512, 0, 0.1) is None


def test_first_tokens_teach_the_planner_and_ends_are_forgotten() -> None:
    cold_starts = _cold_starts()
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    cold_starts.may_start(request, 0, 0.0)
    before = cold_starts.decision(RequestId(1))
    assert before is not None
    told = cold_starts.first_token(RequestId(1), 1.0)  # far later than predicted
    assert told is not None
    assert (told.strategy, told.reason) == ("assisted", before.reason)
    assert cold_starts.counts() == {"assisted": 1}
    cold_starts.forget(RequestId(1))
    assert cold_starts.decision(RequestId(1)) is None
    cold_starts.load_ended(ADAPTER, 1.0)
    cold_starts.load_started(ADAPTER, 2.0, is_demand=True)
    cold_starts.may_start(request, 0, 2.0)
    after = cold_starts.decision(RequestId(1))
    assert after is not None
    times = [
        next(p for p in d.predictions if p.strategy is LoadStrategy.ASSISTED).first_token_s
        for d in (before, after)
    ]
    assert times[1] > 1.5 * times[0]


def test_another_planner_brings_its_own_link() -> None:
    cold_starts = _cold_starts()
    faster = Planner(_model(100_000.0), PlannerConfig(forced=LoadStrategy.PIPELINED))
    cold_starts.use(faster)
    request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter_bytes=400)
    cold_starts.load_started(ADAPTER, 0.0, is_demand=True)
    assert cold_starts.may_start(request, 0, 0.0)
    decision = cold_starts.decision(RequestId(1))
    assert decision is not None
    assert decision.strategy is LoadStrategy.PIPELINED
    (prediction,) = decision.predictions
    assert prediction.first_token_s == pytest.approx(200 / 100_000.0 + 32 * 0.004)
    with pytest.raises(AssertionError, match="ledger"):
        cold_starts.use(faster)
