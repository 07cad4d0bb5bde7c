"""Rows that share a step with a cold chunk cost the same as in their own step."""

from dataclasses import replace

import pytest
from corun.profiles.curve import Curve
from corun.profiles.step_time import forward_s
from corun.runtime.adapter import AdapterFacts
from corun.runtime.coldstart.cold import (
    AdapterShape,
    ColdPart,
    ColdRequest,
    CoScheduledRows,
    co_scheduled_decodes,
    co_scheduled_rows,
    layer_times,
    warm_step_s,
)
from corun.runtime.plan import AdapterId
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import StepRows
from support.profiles import PROFILE
from support.scheduling import make_request

_BYTES = 10**6
_SHAPE = AdapterShape(_BYTES, ((0,),) * PROFILE.model.num_layers)
_MODEL = replace(
    PROFILE.model,
    host_step_s=0.003,
    host_row_s=1e-4,
    prefill_s_per_token_key=1e-6,
    decode_s_per_key=1e-5,
    decode_step_s=Curve((1.0, 64.0), (0.0005, 0.0015)),
)


def _request(number: int, num_computed: int, *, has_adapter: bool) -> Request:
    adapter = AdapterFacts("d", 8, _BYTES) if has_adapter else None
    request = make_request(number, prompt=200, adapter_id=AdapterId(number), adapter=adapter)
    request.num_computed_tokens = num_computed
    return request


def _rows(*, is_decode_separate: bool) -> StepRows:
    """Two that decode, and a chunk of 40 tokens."""
    decodes = [_request(1, 150, has_adapter=True), _request(2, 9, has_adapter=False)]
    chunk = _request(3, 64, has_adapter=True)
    return StepRows(64, is_decode_separate, decodes, [(chunk, 40)])


@pytest.mark.parametrize("read_s", [0.0, 0.05])
def test_a_mixed_step_is_one_forward_pass(read_s: float) -> None:
    model = replace(_MODEL, read_s=read_s)
    cold = ColdPart(16, _SHAPE, 0, (), 7)
    co_scheduled = co_scheduled_rows(model, _rows(is_decode_separate=False), [cold])
    rows = [1, 1, 40, 16], [150, 9, 64, 7], [_BYTES, 0, _BYTES, _BYTES]
    assert warm_step_s(model, co_scheduled) == pytest.approx(forward_s(model, *rows))
    assert co_scheduled.num_forward_tokens == 58


def test_rows_that_decode_apart_have_a_pass_of_their_own_and_the_step_one_host() -> None:
    co_scheduled = co_scheduled_rows(_MODEL, _rows(is_decode_separate=True), [])
    decodes_s = forward_s(_MODEL, [1, 1], [150, 9], [_BYTES, 0])
    chunk_s = forward_s(_MODEL, [40], [64], [_BYTES])
    expected_s = decodes_s + chunk_s - _MODEL.host_step_s
    assert warm_step_s(_MODEL, co_scheduled) == pytest.approx(expected_s)
    assert co_scheduled.num_forward_tokens == 40


def test_cold_rows_apart_follow_one_pass_of_all_warm_rows() -> None:
    rows = replace(_rows(is_decode_separate=False), is_cold_separate=True)
    cold = ColdPart(16, _SHAPE, 0, (), 7)
    co_scheduled = co_scheduled_rows(_MODEL, rows, [cold])
    warm_s = forward_s(_MODEL, [1, 1, 40], [150, 9, 64], [_BYTES, 0, _BYTES])
    cold_s = forward_s(_MODEL, [16], [7], [_BYTES])
    expected_s = warm_s + cold_s - _MODEL.host_step_s
    assert warm_step_s(_MODEL, co_scheduled) == pytest.approx(expected_s)
    assert co_scheduled.num_forward_tokens == 16


@pytest.mark.parametrize("is_decode_separate", [False, True])
def test_later_steps_have_those_that_decode(is_decode_separate: bool) -> None:
    rows = _rows(is_decode_separate=is_decode_separate)
    alone = StepRows(64, is_decode_separate, rows.decodes)
    assert co_scheduled_decodes(_MODEL, rows) == co_scheduled_rows(_MODEL, alone, [])
    assert co_scheduled_decodes(_MODEL, StepRows(64, is_decode_separate)) == CoScheduledRows()


@pytest.mark.parametrize("read_s", [0.0, 0.02, 0.05])
def test_a_chunk_whose_adapter_is_there_takes_the_layers_of_a_warm_one(read_s: float) -> None:
    """Also if reading the weights hides costs, and beside other cold rows."""
    model = replace(_MODEL, read_s=read_s)
    other = ColdPart(16, _SHAPE, 0, (0.0, 0.0), 7)
    co_scheduled = co_scheduled_rows(model, _rows(is_decode_separate=False), [other])
    request = ColdRequest(
        num_tokens=8, adapter=_SHAPE, ready_s=(0.0, 0.0), max_chunk_tokens=64, start_position=90
    )
    times = layer_times(model, request, 8, co_scheduled)
    own = ColdPart(8, _SHAPE, 0, (), 90)
    assert sum(times.device_s) == pytest.approx(warm_step_s(model, co_scheduled.with_row(own)))
