"""The planner: what it chooses on machines of different shape, and how it learns."""

from dataclasses import replace

import pytest
from corun.profiles.curve import Curve, CurveFamily
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.runtime.planner.cold import AdapterShape, ColdRequest
from corun.runtime.planner.planner import Planner, PlannerConfig
from corun.runtime.planner.predict import predict
from corun.runtime.planner.strategy import LoadStrategy

_LAYERS = 4


def _model(*, delta_s_per_token: float = 0.0005) -> MachineModel:
    """10 ms per layer of 10 tokens: 4 groups of 1 ms a token base, deltas of rank 16 as given."""
    base = Curve((1.0, 101.0), (0.001, 0.101))
    delta = CurveFamily(
        (16.0,), (Curve((1.0, 101.0), (delta_s_per_token, 101 * delta_s_per_token)),)
    )
    return MachineModel(
        num_layers=_LAYERS,
        step_s=Curve((1.0, 101.0), (0.016, 0.016 * 101)),
        groups=tuple(GroupModel(name, base, delta) for name in ("q_proj", "o_proj")),
        invocation_s=0.0001,
        lora=LoraModel(0.0, 0.0, 1e-9, 0.0),
        link=LinkModel(1e9, 0.0),
        num_workers=1,
        tokens_per_worker=64,
    )


def _cold(*, load_s: float, num_running: int = 0, num_workers: int = 1) -> ColdRequest:
    return ColdRequest(
        num_tokens=32,
        adapter=AdapterShape(1000, ((16, 16),) * _LAYERS),
        ready_s=tuple(load_s * (layer + 1) / _LAYERS for layer in range(_LAYERS)),
        max_chunk_tokens=512,
        num_running=num_running,
        running_step_s=0.016,
        num_workers=num_workers,
    )


def test_workers_hide_a_long_load() -> None:
    decision = Planner(_model()).decide(_cold(load_s=2.0))
    assert decision.strategy is LoadStrategy.ASSISTED
    chosen = decision.predictions[0]
    assert chosen.split_layer == _LAYERS
    assert chosen.first_token_s == pytest.approx(0.512 + _LAYERS * 2 * 0.0001)
    assert "assisted" in decision.reason


def test_a_fast_link_needs_no_workers() -> None:
    decision = Planner(_model()).decide(_cold(load_s=0.001))
    assert decision.strategy is LoadStrategy.PIPELINED


def test_without_workers_the_load_is_pipelined() -> None:
    decision = Planner(_model()).decide(_cold(load_s=2.0, num_workers=0))
    assert decision.strategy is not LoadStrategy.ASSISTED
    assert "no worker" in decision.reason


def test_others_are_not_made_to_wait_for_a_load() -> None:
    # Workers as slow as thrice the layer: every start but waiting for the load stalls the others.
    slow = _model(delta_s_per_token=0.01)
    assert Planner(slow).decide(_cold(load_s=2.0)).strategy is not LoadStrategy.ASYNC_LOAD
    decision = Planner(slow).decide(_cold(load_s=2.0, num_running=8))
    assert decision.strategy is LoadStrategy.ASYNC_LOAD


def test_blocking_stalls_everybody_for_the_whole_load() -> None:
    request = _cold(load_s=2.0, num_running=3)
    blocking = predict(_model(), request, LoadStrategy.BLOCKING)
    waiting = predict(_model(), request, LoadStrategy.ASYNC_LOAD)
    assert blocking.first_token_s == waiting.first_token_s == pytest.approx(2.512, abs=1e-3)
    assert blocking.stall_s == pytest.approx(2.0)
    assert waiting.stall_s == pytest.approx(0.0)


def test_the_second_token_need_not_wait_for_the_load() -> None:
    request = _cold(load_s=10.0)
    assisted = predict(_model(), request, LoadStrategy.ASSISTED)
    pipelined = predict(_model(), request, LoadStrategy.PIPELINED)
    assert assisted.second_token_s < 1.0
    assert pipelined.second_token_s > 10.0


def test_chunks_let_the_running_requests_in_between() -> None:
    alone = predict(_model(), _cold(load_s=0.0), LoadStrategy.PIPELINED)
    chunked = replace(_cold(load_s=0.0, num_running=1), max_chunk_tokens=8)
    beside = predict(_model(), chunked, LoadStrategy.PIPELINED)
    assert beside.first_token_s == pytest.approx(alone.first_token_s + 3 * 0.016)


def test_more_slices_than_workers_queue() -> None:
    model = replace(_model(), tokens_per_worker=8)  # four slices of eight tokens
    request = _cold(load_s=100.0)
    one = predict(model, request, LoadStrategy.ASSISTED)
    four = predict(model, replace(request, num_workers=4), LoadStrategy.ASSISTED)
    assert four.first_token_s <= one.first_token_s


def test_a_forced_strategy_is_taken_and_said() -> None:
    planner = Planner(_model(), PlannerConfig(forced=LoadStrategy.BLOCKING))
    decision = planner.decide(_cold(load_s=0.001))
    assert decision.strategy is LoadStrategy.BLOCKING
    assert "forced" in decision.reason


def test_a_gain_below_the_margin_is_left() -> None:
    request = _cold(load_s=0.56)
    bold = Planner(_model(), PlannerConfig(margin=0.0)).decide(request)
    shy = Planner(_model(), PlannerConfig(margin=0.9)).decide(request)
    assert bold.strategy is LoadStrategy.ASSISTED
    assert shy.strategy is LoadStrategy.PIPELINED
    assert "would gain only" in shy.reason


def test_measurements_correct_the_predictions() -> None:
    planner = Planner(_model())
    request = _cold(load_s=2.0)
    before_s = planner.predict(request, LoadStrategy.ASSISTED).first_token_s
    for _ in range(30):
        predicted_s = planner.predict(request, LoadStrategy.ASSISTED).first_token_s
        planner.observe(LoadStrategy.ASSISTED, predicted_s, before_s * 1.2)
    after_s = planner.predict(request, LoadStrategy.ASSISTED).first_token_s
    assert after_s == pytest.approx(before_s * 1.2, rel=0.02)


def test_a_bad_streak_leaves_the_workers_alone_for_a_while() -> None:
    config = PlannerConfig(streak_limit=3, penalty_decisions=2, smoothing=0.0)
    planner = Planner(_model(), config)
    request = _cold(load_s=10.0)
    for _ in range(3):
        predicted_s = planner.predict(request, LoadStrategy.ASSISTED).first_token_s
        planner.observe(LoadStrategy.ASSISTED, predicted_s, predicted_s * 1.5)
    for _ in range(2):
        decision = planner.decide(request)
        assert decision.strategy is not LoadStrategy.ASSISTED
        assert "streak" in decision.reason
    assert planner.decide(request).strategy is LoadStrategy.ASSISTED


def test_good_ones_between_end_a_streak() -> None:
    planner = Planner(_model(), PlannerConfig(streak_limit=2))
    for measured in (2.0, 1.0, 2.0, 1.0, 2.0):
        planner.observe(LoadStrategy.ASSISTED, 1.0, measured)
    assert "streak" not in planner.decide(_cold(load_s=10.0)).reason
