"""Predicted times of steps for policies: from a profile, and learned."""

from dataclasses import replace

import pytest
from corun.profiles.curve import Curve
from corun.profiles.models import LoraModel, MachineModel
from corun.profiles.step_time import forward_s
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_times import LearnedTimes, ProfiledTimes, StepPace
from support.profiles import PROFILE
from support.scheduling import make_executor, make_request, make_scheduler

STEP_TOKENS = 100
ADAPTER_BYTES = 1000

# 1 s + 0.1 s per prompt token + 0.001 s per token and key + 0.01 s per row + 0.1 ms per key of a
# row that decodes; an adapter adds 0.02 s per prompt token.
_MODEL: MachineModel = replace(
    PROFILE.model,
    step_s=Curve((0.0, 1.0), (0.0, 0.1)),
    lora=LoraModel(
        decode_s_per_byte=0.0,
        decode_fixed_s=0.0,
        prefill_s_per_token_byte=0.02 / ADAPTER_BYTES,
        prefill_fixed_s=0.0,
    ),
    host_step_s=1.0,
    host_row_s=0.01,
    prefill_s_per_token_key=0.001,
    decode_s_per_key=0.0001,
    read_s=0.0,
    decode_token_share=0.0,
    decode_step_s=None,
)


def prefill_s(start: int, end: int, adapter_s_per_token: float = 0.0) -> float:
    """One step of one request, with every key that its tokens look at counted."""
    keys = sum(position + 1 for position in range(start, end))
    return 1.01 + (0.1 + adapter_s_per_token) * (end - start) + 0.001 * keys


class TestFromAProfile:
    TIMES = ProfiledTimes(_MODEL, STEP_TOKENS)

    def test_a_prompt_of_one_step(self) -> None:
        assert self.TIMES.prefill_s(60, 0) == pytest.approx(prefill_s(0, 60))
        with_adapter = pytest.approx(prefill_s(0, 60, 0.02))
        assert self.TIMES.prefill_s(60, ADAPTER_BYTES) == with_adapter

    def test_a_long_prompt_is_computed_in_chunks(self) -> None:
        chunks = [(0, 100), (100, 200), (200, 250)]
        expected = sum(prefill_s(start, end, 0.02) for start, end in chunks)
        assert self.TIMES.prefill_s(250, ADAPTER_BYTES) == pytest.approx(expected)
        whole = sum(prefill_s(start, end) for start, end in chunks[:2])
        assert self.TIMES.prefill_s(200, 0) == pytest.approx(whole)
        assert self.TIMES.prefill_s(0, 0) == 0.0

    def test_decode_steps(self) -> None:
        assert self.TIMES.decode_step_s(8) == pytest.approx(1.0 + 8 * (0.01 + 0.0001))

    def test_nothing_is_learned(self) -> None:
        times = ProfiledTimes(_MODEL, STEP_TOKENS)
        times.step_ended(8, 1000.0)
        assert times.decode_step_s(8) == self.TIMES.decode_step_s(8)


class TestLearned:
    def test_nothing_is_known_at_first(self) -> None:
        times = LearnedTimes(STEP_TOKENS)
        assert (times.prefill_s(250, 0), times.decode_step_s(8)) == (0.0, 0.0)

    def test_steps_of_one_size_say_the_same_of_all(self) -> None:
        times = LearnedTimes(STEP_TOKENS)
        times.step_ended(10, 0.5)
        assert [times.decode_step_s(rows) for rows in (1, 10, 100)] == [0.5, 0.5, 0.5]

    def test_between_sizes_it_is_linear_and_whole_steps_are_counted(self) -> None:
        times = LearnedTimes(STEP_TOKENS)
        times.step_ended(10, 0.2)
        times.step_ended(100, 1.1)
        assert times.decode_step_s(55) == pytest.approx(0.65)
        assert times.prefill_s(250, 0) == pytest.approx(2 * 1.1 + times.decode_step_s(50))
        assert times.prefill_s(200, ADAPTER_BYTES) == pytest.approx(2.2)
        assert times.prefill_s(0, 0) == 0.0

    def test_new_steps_count_for_a_tenth(self) -> None:
        times = LearnedTimes(STEP_TOKENS)
        times.step_ended(8, 1.0)
        times.step_ended(12, 2.0)  # of like size
        assert times.decode_step_s(8) == pytest.approx(1.1)

    def test_what_falls_with_more_tokens_is_averaged_out(self) -> None:
        times = LearnedTimes(STEP_TOKENS)
        times.step_ended(10, 0.4)
        times.step_ended(100, 0.2)
        assert times.decode_step_s(10) == times.decode_step_s(100) == pytest.approx(0.3)

    def test_a_model_for_those_who_want_one(self) -> None:
        times = LearnedTimes(STEP_TOKENS)
        assert forward_s(times.machine_model(), (5,), (0,), (0,)) == 0.0
        times.step_ended(10, 0.2)
        times.step_ended(100, 1.1)
        model = times.machine_model()
        assert forward_s(model, (55,), (0,), (ADAPTER_BYTES,)) == pytest.approx(0.65)
        assert forward_s(model, (1,) * 10, (40,) * 10, (0,) * 10) == pytest.approx(0.2)


class Noted(LearnedTimes):
    """Records the steps that it is given."""

    def __init__(self, max_step_tokens: int) -> None:
        super().__init__(max_step_tokens)
        self.taken: list[tuple[int, float]] = []

    def step_ended(self, num_tokens: int, duration_s: float) -> None:
        self.taken.append((num_tokens, duration_s))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_scheduler_tells_how_long_steps_took(depth: int) -> None:
    """Of two steps in flight the second begins when the first has ended."""
    times = Noted(STEP_TOKENS)
    scheduler = make_scheduler(times=times)
    executor = make_executor(scheduler, is_automatic=False)
    scheduler.add_request(make_request(1, prompt=5, max_tokens=8), 0.0)
    for _ in range(depth):
        plan = scheduler.schedule(1.0)
        assert plan is not None
        executor.submit(plan)
    for now_s in (3.0, 7.0)[:depth]:
        executor.finish_step()
        for result in executor.poll():
            scheduler.update(result, now_s)
    assert times.taken == [(5, 2.0), (1, 4.0)][:depth]


# 1 s for a step, 0.1 s per token, 0.5 s for the core and 0.01 s per row there.
_PACE_MODEL = replace(
    PROFILE.model,
    step_s=Curve((0.0, 1.0), (0.0, 0.1)),
    decode_step_s=None,
    host_step_s=1.0,
    host_row_s=0.0,
    prefill_s_per_token_key=0.0,
    decode_s_per_key=0.0,
    read_s=0.0,
    decode_token_share=1.0,
    turn_s=0.5,
    turn_row_s=0.01,
)


def run_step(scheduler: Scheduler, began_s: float, duration_s: float) -> None:
    executor = make_executor(scheduler)
    plan = scheduler.schedule(began_s)
    assert plan is not None
    executor.submit(plan)
    for result in executor.poll():
        scheduler.update(result, began_s + duration_s)


def test_nothing_is_measured_at_first() -> None:
    assert StepPace(_PACE_MODEL).measured_over_predicted == 1.0


@pytest.mark.parametrize("slowness", [0.5, 1.0, 4.0])
def test_a_step_against_what_the_model_says(slowness: float) -> None:
    pace = StepPace(_PACE_MODEL)
    scheduler = make_scheduler(pace=pace)
    scheduler.add_request(make_request(1, prompt=5), 0.0)
    scheduler.add_request(make_request(2, prompt=6), 0.0)
    predicted_s = 1.0 + 0.1 * 11 + 0.5 + 0.01 * 2
    run_step(scheduler, 0.0, slowness * predicted_s)
    assert pace.measured_over_predicted == pytest.approx(slowness)


def test_what_was_long_ago_is_forgotten() -> None:
    pace = StepPace(_PACE_MODEL)
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
