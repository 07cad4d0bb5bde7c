"""The measurement of scheduling's cost: control flow and verdicts."""

import dataclasses

import pytest
import scheduler
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES


@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
@pytest.mark.parametrize("situation", scheduler.SITUATIONS, ids=lambda one: one.name)
def test_rows_stay_as_many_as_they_are(
    policy: str, situation: scheduler.Situation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "NUM_WAITING", (100, 200))
    if situation.row_ends:  # a short history is as good
        situation = dataclasses.replace(situation, num_free_blocks=16_384)
    costs = scheduler.measure(policy, situation, num_steps=80)
    assert len(costs) == 2
    assert all(cost.both_us > 0 and min(cost.num_calls) > scheduler.NUM_ROWS for cost in costs)


def test_queues_are_cut_anew() -> None:
    assert scheduler.has_queues("chameleon")
    assert not scheduler.has_queues("corun")
    assert scheduler.measure_refresh("chameleon", 100) > 0


def test_what_grows_with_those_who_wait_fails() -> None:
    def costs(step_s: float, num_calls: int) -> scheduler.Costs:
        made = scheduler.Costs()
        made.num_calls = [1, num_calls, num_calls]
        for _ in range(2):
            made.note((step_s / 2, step_s / 2))
        return made

    judged = scheduler.judge(
        {
            ("corun", "no KV"): (costs(200e-6, 3000), costs(299e-6, 3000)),
            ("sjf", "no KV"): (costs(301e-6, 3001), costs(460e-6, 3001)),
        },
        {("chameleon", 1000): 4.9, ("chameleon", 100_000): 5.1},
    )
    assert list(judged.values()) == [True, True, True, False, False, False, True, False]
