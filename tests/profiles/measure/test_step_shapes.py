"""The measured steps; fitting the times of a machine gives the same machine."""

import random
from dataclasses import replace

import pytest
from corun.profiles.curve import Curve
from corun.profiles.fit import Fit, Plane, fit_with_held_out
from corun.profiles.measure.step_shapes import (
    DECODE_CONTEXT_TOKENS,
    StepShape,
    StepSizes,
    num_needed,
    step_point,
    step_shapes,
    with_steps,
)
from corun.profiles.models import MachineModel
from corun.profiles.step_time import forward_s, num_keys
from support.profiles import PROFILE

_SIZES = StepSizes(
    decode_rows=(1, 4, 16), chunk_tokens=(16, 64, 256), context_tokens=(256, 2048), max_kv_tokens=8192
)
_TRUTH = replace(PROFILE.model, step_s=Curve((1.0, 64.0, 256.0), (0.001, 0.004, 0.012)))


def _step_s(shape: StepShape, model: MachineModel = _TRUTH) -> float:
    return forward_s(model, shape.num_tokens, shape.start_positions, [0] * len(shape.num_tokens))


def _curves() -> tuple[Curve, Curve]:
    """The machine as forwards alone show it: with attention, without the host."""
    prefill_s, decode_s = _TRUTH.step_s, _TRUTH.decode_step_s
    assert decode_s is not None
    key_s, decode_key_s = _TRUTH.prefill_s_per_token_key, _TRUTH.decode_s_per_key
    num_context = DECODE_CONTEXT_TOKENS + 1
    return (
        Curve(prefill_s.x, tuple(prefill_s.at(x) + key_s * num_keys(int(x), 0) for x in prefill_s.x)),
        Curve(decode_s.x, tuple(decode_s.at(x) + decode_key_s * x * num_context for x in decode_s.x)),
    )


def _fit(times_s: list[float], shapes: list[StepShape]) -> Fit:
    points = [step_point(shape, *_curves()) for shape in shapes]
    return fit_with_held_out(points, times_s, num_known=1)


def test_steps_are_of_all_kinds_and_within_what_is_allowed() -> None:
    shapes = step_shapes(_SIZES)
    assert [s.total_tokens for s in shapes] == sorted(s.total_tokens for s in shapes)
    assert StepShape((1,) * 4, (2047,) * 4) in shapes
    assert StepShape((1,) * 16, (2047,) * 16) not in shapes  # more KV than allowed
    assert StepShape((64,), (1984,)) in shapes
    assert StepShape((32, 32), (0, 0)) in shapes
    assert StepShape((1, 1, 1, 1, 60), (512, 512, 512, 512, 0)) in shapes
    assert len({shape.name for shape in shapes}) == len(shapes)
    for shape in shapes:
        spans = zip(shape.start_positions, shape.num_tokens, strict=True)
        assert all(start >= 0 and start + n <= 2048 for start, n in spans)


@pytest.mark.parametrize(("limit", "max_chunk"), [(16, 16), (32, 16), (100, 64)])
def test_short_contexts_and_small_steps_do(limit: int, max_chunk: int) -> None:
    sizes = replace(_SIZES, chunk_tokens=(max_chunk,), context_tokens=(limit,))
    shapes = step_shapes(sizes)
    assert num_needed(shapes) >= 6  # points: two more than three terms need, and some to hold out
    assert _fit([_step_s(shape) for shape in shapes], shapes).r_squared > 0.99


def test_the_few_steps_that_are_always_measured_show_every_term() -> None:
    shapes = step_shapes(_SIZES)
    few = shapes[: num_needed(shapes)]
    assert len(few) < len(shapes) and few[-1].total_tokens == 16
    plane = _fit([_step_s(shape) for shape in few], few).plane
    assert min(plane.slopes) > 0.0 and plane.intercept > 0.0


def test_a_machine_is_found_again_and_no_attention_counts_twice() -> None:
    shapes = step_shapes(_SIZES)
    fit = _fit([_step_s(shape) for shape in shapes], shapes)
    assert fit.r_squared > 0.9999
    found = with_steps(PROFILE.model, fit.plane, *_curves(), 1.0)
    assert found.host_step_s == pytest.approx(_TRUTH.host_step_s, rel=0.05)
    assert found.host_row_s == pytest.approx(_TRUTH.host_row_s, rel=0.05)
    assert found.prefill_s_per_token_key == pytest.approx(3e-9, rel=0.05)
    assert found.decode_s_per_key == pytest.approx(4e-8, rel=0.05)
    for shape in (*shapes, StepShape((40, 1, 1, 9), (900, 30, 2000, 7)), StepShape((1,), (0,))):
        assert _step_s(shape, found) == pytest.approx(_step_s(shape), rel=0.02)
    longer = with_steps(PROFILE.model, fit.plane, *_curves(), 1.25)
    for shape in shapes:
        assert _step_s(shape, longer) == pytest.approx(1.25 * _step_s(shape, found))


def test_noise_of_a_few_percent_is_borne() -> None:
    rng = random.Random(0)
    shapes = step_shapes(_SIZES)
    fit = _fit([_step_s(shape) * rng.uniform(0.96, 1.04) for shape in shapes], shapes)
    assert fit.r_squared > 0.96


def test_attention_that_was_put_too_high_leaves_no_negative_times() -> None:
    model = with_steps(PROFILE.model, Plane((1.0, 0.0, 1.0, 1.0), 0.0), *_curves(), 1.0)
    assert model.decode_step_s is not None
    assert min(*model.step_s.y, *model.decode_step_s.y) >= 0.0
