"""Costs of an engine that reports none, from its answers."""

from corun.runtime.cluster.gateway.links import MIN_ANSWERS, AnswerTimes
from support.fake_cluster import profile_of


def test_costs_are_used_after_enough_answers() -> None:
    given, times = profile_of(), AnswerTimes(512)
    for _ in range(MIN_ANSWERS - 1):
        times.first_token(256, 4, 0.130)
        times.other_tokens(10, 4, 0.5)
    assert times.applied_to(given) == given
    times.other_tokens(0, 4, 0.0)  # an answer of one token has no steps after it
    step_s = times.applied_to(given).machine.step_s
    assert abs(step_s.at(260) - 0.130) < 1e-9 and abs(step_s.at(4) - 0.05) < 1e-9
    assert 0.05 < step_s.at(100) < 0.130


def test_a_prompt_of_several_steps_is_no_step() -> None:
    given, times = profile_of(), AnswerTimes(512)
    for _ in range(MIN_ANSWERS):
        times.first_token(510, 4, 9.0)
        times.other_tokens(10, 4, 0.5)
    assert abs(times.applied_to(given).machine.step_s.at(512) - 0.05) < 1e-9
