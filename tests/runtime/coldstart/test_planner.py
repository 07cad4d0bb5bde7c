"""The planner: its choices on different machines, and its learning."""

from dataclasses import replace

import pytest
from corun.cpu_workers.teams import JobModel
from corun.profiles.curve import Curve
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.profiles.step_time import RowCosts
from corun.runtime.coldstart.cold import EMPTY, AdapterShape, ColdPart, ColdRequest, CoScheduledRows
from corun.runtime.coldstart.planner import Planner, PlannerConfig
from corun.runtime.coldstart.predict import StepForecast, choose_start, predict
from corun.runtime.coldstart.strategy import AT_ONCE, LoadStrategy

_LAYERS = 4
_BOUNDED = PlannerConfig(max_stall_share=0.05)


def _model(*, delta_s_per_token: float = 0.0005) -> MachineModel:
    """10 ms per layer of 10 tokens: 4 groups of 1 ms a token base, deltas of rank 16 as given."""
    base = Curve((1.0, 101.0), (0.001, 0.101))
    return MachineModel(
        num_layers=_LAYERS,
        step_s=Curve((1.0, 101.0), (0.016, 0.016 * 101)),
        groups=tuple(GroupModel(name, base, 1 / 16) for name in ("q_proj", "o_proj")),
        invocation_s=0.0001,
        lora=LoraModel(0.0, 0.0, 1e-9, 0.0),
        link=LinkModel(1e9, 0.0),
        num_workers=1,
        job=JobModel(s_per_product=delta_s_per_token),
    )


def _cold(*, load_s: float, num_running: int = 0, num_workers: int = 1, priority: float = 1.0) -> ColdRequest:
    return ColdRequest(
        num_tokens=32,
        adapter=AdapterShape(1000, ((16, 16),) * _LAYERS),
        ready_s=tuple(load_s * (layer + 1) / _LAYERS for layer in range(_LAYERS)),
        max_chunk_tokens=512,
        max_assisted_tokens=512,
        num_workers=num_workers,
        num_running=num_running,
        priority=priority,
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


@pytest.mark.parametrize("forced", [None, LoadStrategy.ASSISTED])
def test_adapters_with_factors_have_no_workers(forced: LoadStrategy | None) -> None:
    """And the reason says so."""
    cold = replace(_cold(load_s=2.0), not_by_workers="DoRA")
    decision = Planner(_model(), PlannerConfig(forced=forced)).decide(cold)
    assert decision.strategy is LoadStrategy.PIPELINED
    assert decision.reason.endswith("; workers do not compute DoRA")


def test_others_are_not_made_to_wait_for_a_load() -> None:
    # Workers as slow as thrice the layer: every start but waiting for the load stalls the others.
    slow = _model(delta_s_per_token=0.01)
    assert Planner(slow).decide(_cold(load_s=2.0)).strategy is not LoadStrategy.ASYNC_LOAD
    decision = Planner(slow).decide(_cold(load_s=2.0, num_running=8))
    assert decision.strategy is LoadStrategy.PIPELINED
    assert decision.predictions[0].stall_s == pytest.approx(0.0)


def _beside(num_running: int, priority: float) -> ColdRequest:
    """Return a request beside decode rows; its deltas take three times the base products' time."""
    rows = CoScheduledRows(RowCosts(num_decodes=num_running))
    return replace(
        _cold(load_s=9.0, num_running=num_running, priority=priority),
        co_scheduled=rows,
        later_co_scheduled=rows,
    )


@pytest.mark.parametrize("num_running", [1, 8])
def test_seconds_of_the_others_are_weighed_against_those_of_the_request(num_running: int) -> None:
    model = _model(delta_s_per_token=0.003)
    planner = Planner(model)
    request = _beside(num_running, 1.0)
    assisted, waiting = (
        predict(model, request, one) for one in (LoadStrategy.ASSISTED, LoadStrategy.ASYNC_LOAD)
    )
    assert assisted.stall_s > 0.1 and waiting.stall_s == pytest.approx(0.0)
    gain_s = predict(model, request, LoadStrategy.PIPELINED).first_token_s - assisted.first_token_s
    even = num_running * assisted.stall_s / gain_s
    for priority, is_assisted in ((0.8 * even, False), (1.2 * even, True), (0.0, False)):
        priced = _beside(num_running, priority)
        decision = planner.decide(priced)
        assert (decision.strategy is LoadStrategy.ASSISTED) == is_assisted
        step = planner.step_now(priced, 32, LoadStrategy.ASSISTED)
        assert (step is not None) == is_assisted
        if not is_assisted:
            assert decision.predictions[0].stall_s == pytest.approx(0.0, abs=1e-9)


def test_a_chunk_begins_later_where_it_then_ends_as_early() -> None:
    """A load of twice the chunk's time: the step begins when all its layers come in time."""
    request = _beside(2, 1.0)
    start = choose_start(_model(), request, 32, request.co_scheduled, LoadStrategy.PIPELINED)
    now = StepForecast(_model(), request, 32, request.co_scheduled, LoadStrategy.PIPELINED).at(0.0)
    assert start.begin_s == pytest.approx(now.wait_s)
    assert start.begin_s + start.step.end_s == pytest.approx(now.end_s)
    assert start.step.wait_s == pytest.approx(0.0, abs=1e-9)
    lone = replace(request, num_running=0)
    assert choose_start(_model(), lone, 32, request.co_scheduled, LoadStrategy.PIPELINED).begin_s == 0.0


def test_blocking_stalls_everybody_for_the_whole_load() -> None:
    request = _cold(load_s=2.0, num_running=3)
    blocking = predict(_model(), request, LoadStrategy.BLOCKING)
    waiting = predict(_model(), request, LoadStrategy.ASYNC_LOAD)
    assert blocking.first_token_s == waiting.first_token_s == pytest.approx(2.512, abs=1e-3)
    assert blocking.stall_s == pytest.approx(2.0)
    assert waiting.stall_s == pytest.approx(0.0)


def test_the_second_token_need_not_wait_for_the_load() -> None:
    request = _cold(load_s=10.0)
    assisted, pipelined = (
        StepForecast(_model(), request, 1, EMPTY, strategy).at(0.0)
        for strategy in (LoadStrategy.ASSISTED, LoadStrategy.PIPELINED)
    )
    assert assisted.end_s < 0.1
    assert pipelined.end_s > 10.0


def test_chunks_share_their_steps_with_those_that_decode() -> None:
    alone = predict(_model(), _cold(load_s=0.0), LoadStrategy.PIPELINED)
    # Two of them, for half a millisecond more than their tokens, in each of four steps.
    co_scheduled = CoScheduledRows(RowCosts(num_decodes=2, other_s=0.0005))
    chunked = replace(
        _cold(load_s=0.0, num_running=2),
        max_chunk_tokens=8,
        co_scheduled=co_scheduled,
        later_co_scheduled=co_scheduled,
    )
    beside = predict(_model(), chunked, LoadStrategy.PIPELINED)
    assert beside.first_token_s == pytest.approx(alone.first_token_s + 4 * (2 * 0.016 + 0.0005))
    assert beside.stall_s == pytest.approx(0.0)
    # Or before each of them, in a forward of their own.
    co_scheduled = CoScheduledRows(separate_s=0.02)
    apart = predict(
        _model(),
        replace(chunked, co_scheduled=co_scheduled, later_co_scheduled=co_scheduled),
        LoadStrategy.PIPELINED,
    )
    assert apart.first_token_s == pytest.approx(alone.first_token_s + 4 * 0.02)


def test_what_shares_the_first_step_is_gone_from_the_next() -> None:
    co_scheduled = CoScheduledRows(RowCosts(100))
    request = replace(_cold(load_s=0.0, num_running=1), max_chunk_tokens=16, co_scheduled=co_scheduled)
    alone = predict(_model(), _cold(load_s=0.0), LoadStrategy.PIPELINED)
    beside = predict(_model(), request, LoadStrategy.PIPELINED)
    assert beside.first_token_s == pytest.approx(alone.first_token_s + 100 * 0.016)


def test_the_load_goes_on_while_others_have_their_forward() -> None:
    request = _cold(load_s=0.4)
    step = StepForecast(_model(), request, 32, CoScheduledRows(separate_s=0.4), LoadStrategy.PIPELINED).at(
        0.0
    )
    assert step.wait_s == pytest.approx(0.0)


def test_products_of_all_rows_hide_the_deltas_of_some() -> None:
    model = _model(delta_s_per_token=0.004)  # four times the base product of the same tokens
    alone = StepForecast(model, _cold(load_s=9.0), 8, CoScheduledRows(), LoadStrategy.ASSISTED).at(0.0)
    assert alone.wait_s == pytest.approx(_LAYERS * 2 * (0.0001 + 8 * 0.003), rel=1e-3)
    beside = StepForecast(
        model, _cold(load_s=9.0), 8, CoScheduledRows(RowCosts(32)), LoadStrategy.ASSISTED
    ).at(0.0)
    assert beside.wait_s == pytest.approx(_LAYERS * 2 * 0.0001, rel=0.02)


def test_workers_that_compute_beside_the_device_slow_it_down() -> None:
    contended = replace(_model(), contention=0.25)
    wait_s = [
        StepForecast(model, _cold(load_s=9.0), 8, CoScheduledRows(), LoadStrategy.ASSISTED).at(0.0).wait_s
        for model in (_model(), contended)
    ]
    # Deltas of half a millisecond a token hide behind products of one.
    assert wait_s[1] - wait_s[0] == pytest.approx(_LAYERS * 2 * 0.25 * 8 * 0.0005, rel=1e-3)


def test_a_pass_with_workers_is_prepared_and_settled_once() -> None:
    model = replace(_model(), assisted_pass_s=0.008)
    request = _cold(load_s=9.0)
    other = ColdPart(8, request.adapter, _LAYERS, (0.0,) * _LAYERS)
    for cold in ((), (other,)):
        step = [
            StepForecast(one, request, 8, CoScheduledRows(cold=cold), LoadStrategy.ASSISTED).at(0.0).end_s
            for one in (_model(), model)
        ]
        assert step[1] - step[0] == pytest.approx(0.008)
    step_s = StepForecast(model, request, 8, CoScheduledRows(), LoadStrategy.PIPELINED).at(0.0).end_s
    assert (
        step_s == StepForecast(_model(), request, 8, CoScheduledRows(), LoadStrategy.PIPELINED).at(0.0).end_s
    )


def test_the_deltas_of_several_rows_queue_at_the_workers() -> None:
    model = _model(delta_s_per_token=0.001)
    request = _cold(load_s=9.0)
    other = ColdPart(8, request.adapter, _LAYERS, (0.0,) * _LAYERS)
    wait_s = [
        StepForecast(model, request, 8, CoScheduledRows(cold=cold), LoadStrategy.ASSISTED).at(0.0).wait_s
        for cold in ((), (other,), (other, other))
    ]
    in_turn_s = [number * _LAYERS * 2 * 0.0001 for number in (1, 2, 3)]
    assert wait_s == pytest.approx(in_turn_s, rel=0.02)
    slow = replace(model, job=model.job.slowed(2))
    step = StepForecast(slow, request, 8, CoScheduledRows(cold=(other,)), LoadStrategy.ASSISTED).at(0.0)
    assert step.wait_s == pytest.approx(_LAYERS * 2 * (2 * 0.0001 + 16 * 0.001), rel=1e-3)


def test_more_workers_do_not_make_a_cold_request_later() -> None:
    model = _model()
    request = _cold(load_s=100.0)
    one = predict(model, request, LoadStrategy.ASSISTED)
    four = predict(model, replace(request, num_workers=4), LoadStrategy.ASSISTED)
    assert four.first_token_s <= one.first_token_s


def test_a_forced_strategy_is_taken_and_said() -> None:
    planner = Planner(_model(), PlannerConfig(forced=LoadStrategy.BLOCKING))
    decision = planner.decide(_cold(load_s=0.001))
    assert decision.strategy is LoadStrategy.BLOCKING
    assert "forced" in decision.reason


@pytest.mark.parametrize("forced", AT_ONCE)
def test_a_forced_strategy_that_is_held_back_for_its_stalls_is_used_again(forced: LoadStrategy) -> None:
    planner = Planner(_model(), replace(_BOUNDED, forced=forced))
    request = _cold(load_s=0.001, num_running=4, priority=1000.0)
    for _ in range(20):
        planner.observe_stall(forced, 0.0, 10.0)
    num_held_back = 0
    while planner.step_now(request, 32, forced) is None:
        assert planner.decide(request).strategy is forced
        num_held_back += 1
    assert 10 < num_held_back < 40


@pytest.mark.parametrize("forced", AT_ONCE)
def test_what_a_forced_strategy_costs_is_not_forgotten_while_it_is_used(forced: LoadStrategy) -> None:
    planner = Planner(_model(), replace(_BOUNDED, forced=forced))
    request = _cold(load_s=0.001, num_running=4, priority=1000.0)
    planner.observe_stall(forced, 0.0, 0.1)
    stall_s = planner.predict(request, forced).stall_s
    for _ in range(20):
        planner.decide(request)
        assert planner.step_now(request, 32, forced) is not None
    assert planner.predict(request, forced).stall_s == stall_s


def test_stalls_of_pipelining_fade_where_assistance_is_forced_and_has_no_worker() -> None:
    planner = Planner(_model(), replace(_BOUNDED, forced=LoadStrategy.ASSISTED))
    request = _cold(load_s=0.001, num_running=4, num_workers=0, priority=1000.0)
    for _ in range(20):
        planner.observe_stall(LoadStrategy.PIPELINED, 0.0, 10.0)
    assert planner.step_now(request, 32, LoadStrategy.PIPELINED) is None
    for _ in range(40):
        planner.decide(request)
    assert planner.step_now(request, 32, LoadStrategy.PIPELINED) is not None


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


def test_one_late_first_token_does_not_speak_for_all() -> None:
    planner = Planner(_model())
    request = _cold(load_s=2.0)
    before_s = planner.predict(request, LoadStrategy.ASSISTED).first_token_s
    planner.observe(LoadStrategy.ASSISTED, before_s, 100 * before_s)
    assert planner.predict(request, LoadStrategy.ASSISTED).first_token_s < 2 * before_s


def test_late_first_tokens_are_forgotten_where_another_way_is_taken() -> None:
    planner = Planner(_model(), PlannerConfig(streak_limit=100))
    request = _cold(load_s=2.0)
    for _ in range(10):
        predicted_s = planner.predict(request, LoadStrategy.ASSISTED).first_token_s
        planner.observe(LoadStrategy.ASSISTED, predicted_s, 2 * predicted_s)
    taken = [planner.decide(request).strategy for _ in range(100)]
    assert taken[0] is not LoadStrategy.ASSISTED and taken[-1] is LoadStrategy.ASSISTED


def test_stalls_beyond_their_prediction_are_reckoned_with_until_they_are_forgotten() -> None:
    planner = Planner(_model(), _BOUNDED)
    request = _cold(load_s=2.0, num_running=4)
    before = planner.predict(request, LoadStrategy.ASSISTED)
    assert planner.decide(request).strategy is LoadStrategy.ASSISTED
    assert planner.step_now(request, 32, LoadStrategy.ASSISTED) is not None
    for _ in range(20):
        planner.observe_stall(LoadStrategy.ASSISTED, 0.01, 0.11)
    after = planner.predict(request, LoadStrategy.ASSISTED)
    own_s = before.first_token_s - before.stall_s
    assert after.stall_s == pytest.approx(before.stall_s + 0.1 * own_s, rel=0.02)
    assert after.first_token_s == before.first_token_s
    assert planner.step_now(request, 32, LoadStrategy.ASSISTED) is None
    taken = [planner.decide(request).strategy for _ in range(40)]
    assert taken[0] is not LoadStrategy.ASSISTED and taken[-1] is LoadStrategy.ASSISTED


def test_one_wait_does_not_speak_for_all() -> None:
    planner = Planner(_model())
    planner.observe_stall(LoadStrategy.ASSISTED, 0.0, 50.0)  # something held the machine up
    stall_s = planner.predict(_cold(load_s=2.0), LoadStrategy.ASSISTED).stall_s
    assert stall_s <= 0.06 * 0.512


def test_who_waits_for_the_load_stalls_nobody() -> None:
    planner = Planner(_model())
    for _ in range(5):
        planner.observe_stall(LoadStrategy.ASYNC_LOAD, 0.0, 0.1)
    stall_s = planner.predict(_cold(load_s=2.0, num_running=3), LoadStrategy.ASYNC_LOAD).stall_s
    assert stall_s == pytest.approx(0.0)


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
