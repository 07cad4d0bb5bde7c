"""Measured over predicted time of steps: a decaying ratio of sums."""

from dataclasses import replace

import pytest
from corun.profiles.curve import Curve
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_pace import StepPace
from support.profiles import PROFILE
from support.scheduling import make_executor, make_request, make_scheduler

# 1 s for a step, 0.1 s per token, 0.5 s for the core and 0.01 s per row there.
_MODEL = replace(
    PROFILE.model, step_s=Curve((0.0, 1.0), (0.0, 0.1)), decode_step_s=None, host_step_s=1.0,
    host_row_s=0.0, prefill_s_per_token_key=0.0, decode_s_per_key=0.0, read_s=0.0,
    decode_token_share=1.0, turn_s=0.5, turn_row_s=0.01,
)  # fmt: skip


def run_step(scheduler: Scheduler, began_s: float, duration_s: float) -> None:
    executor = make_executor(scheduler)
    plan = scheduler.schedule(began_s)
    assert plan is not None
    executor.submit(plan)
    for result in executor.poll():
        scheduler.update(result, began_s + duration_s)


def test_nothing_is_measured_at_first() -> None:
    assert StepPace(_MODEL).measured_over_predicted == 1.0


@pytest.mark.parametrize("slowness", [0.5, 1.0, 4.0])
def test_a_step_against_what_the_model_says(slowness: float) -> None:
    pace = StepPace(_MODEL)
    scheduler = make_scheduler(pace=pace)
    scheduler.add_request(make_request(1, prompt=5), 0.0)
    scheduler.add_request(make_request(2, prompt=6), 0.0)
    predicted_s = 1.0 + 0.1 * 11 + 0.5 + 0.01 * 2
    run_step(scheduler, 0.0, slowness * predicted_s)
    assert pace.measured_over_predicted == pytest.approx(slowness)


def test_what_was_long_ago_is_forgotten() -> None:
    pace = StepPace(_MODEL)
    scheduler = make_scheduler(pace=pace, max_model_len=1000)
    now_s, ratios = 0.0, []
    for number, slowness in enumerate([1.0] * 5 + [3.0] * 10, start=1):
        scheduler.add_request(make_request(number, prompt=5, max_tokens=1), now_s)
        duration_s = slowness * (1.0 + 0.5 + 0.5 + 0.01)
        run_step(scheduler, now_s, duration_s)
        now_s += duration_s
        ratios.append(pace.measured_over_predicted)
    assert ratios[4] == pytest.approx(1.0)
    assert ratios == sorted(ratios)
    assert ratios[5] > 1.2
    assert ratios[-1] == pytest.approx(3.0, rel=0.01)
