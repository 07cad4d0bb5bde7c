"""The measurement of scheduling's cost: control flow and verdicts."""

import pytest
import scheduler
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES


@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
@pytest.mark.parametrize("situation", scheduler.SITUATIONS, ids=lambda one: one.name)
def test_rows_stay_as_many_as_they_are(
    policy: str, situation: scheduler.Situation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "NUM_WAITING", (100, 200))
    costs = scheduler.measure(policy, situation, num_steps=80)
    assert len(costs) == 2
    assert all(cost.both_us > 0 for cost in costs)


def test_queues_are_cut_anew() -> None:
    assert scheduler.has_queues("chameleon")
    assert not scheduler.has_queues("corun")
    assert scheduler.measure_refresh("chameleon", 100) > 0


def test_what_grows_with_those_who_wait_fails() -> None:
    def costs(step_s: float) -> scheduler.Costs:
        made = scheduler.Costs()
        for _ in range(2):
            made.note((step_s / 2, step_s / 2))
        return made

    judged = scheduler.judge(
        {
            ("corun", "no KV"): (costs(200e-6), costs(299e-6)),
            ("sjf", "no KV"): (costs(301e-6), costs(460e-6)),
        },
        {("chameleon", 1000): 4.9, ("chameleon", 100_000): 5.1},
    )
    assert list(judged.values()) == [True, True, False, False, True, False]
