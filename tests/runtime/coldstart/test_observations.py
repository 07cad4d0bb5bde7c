"""Measured and predicted delays of steps with cold rows."""

import pytest
from corun.runtime.coldstart.observations import DelayTracker, StallObservation
from corun.runtime.coldstart.strategy import LoadStrategy
from corun.runtime.plan import RequestId, StepId

COLD = RequestId(1)


class Steps:
    """Runs consecutive steps on a fake clock."""

    def __init__(self) -> None:
        self.delays = DelayTracker()
        self._now_s = 10.0
        self._number = 0

    def run(
        self,
        duration_s: float,
        *,
        cold: tuple[RequestId, ...] = (),
        has_others: bool = True,
        begins_s: float = 0.0,
        is_loading: bool = False,
    ) -> StallObservation | None:
        """Run a step that is predicted to take 0.1 s without waits."""
        self._number += 1
        step_id = StepId(self._number)
        self.delays.closed(
            step_id,
            cold,
            0.1,
            self._now_s,
            has_others=has_others,
            begins_s=begins_s,
            is_loading=is_loading or bool(cold),
        )
        self._now_s += duration_s
        return self.delays.ended(step_id, self._now_s)


def test_the_wait_is_what_a_step_takes_beyond_those_that_never_wait() -> None:
    steps = Steps()
    for _ in range(3):
        assert steps.run(0.2) is None  # the machine is half as fast as the profile says
    steps.delays.planned(COLD, LoadStrategy.ASSISTED, 0.003)
    observation = steps.run(0.23, cold=(COLD,))
    assert observation is not None and observation.strategy is LoadStrategy.ASSISTED
    assert observation.predicted_share == pytest.approx(0.03)
    assert observation.measured_share == pytest.approx(0.15)


def test_what_a_load_costs_is_no_wait_for_it() -> None:
    """It would delay other requests as much if the cold request had waited for its end."""
    steps = Steps()
    assert steps.run(0.1) is None
    assert steps.run(0.15, begins_s=0.05) is None
    steps.delays.planned(COLD, LoadStrategy.ASSISTED, 0.0)
    observation = steps.run(0.13, cold=(COLD,), begins_s=0.02)
    assert observation is not None and observation.measured_share == pytest.approx(0.1)
    assert steps.run(0.11, is_loading=True) is None  # as much for rows that wait until it has ended
    steps.delays.planned(COLD, LoadStrategy.ASSISTED, 0.0)
    observation = steps.run(0.121, cold=(COLD,))
    assert observation is not None and observation.measured_share == pytest.approx(0.1)
    assert steps.run(0.1) is None
    steps.delays.planned(COLD, LoadStrategy.ASSISTED, 0.0)
    observation = steps.run(0.11, cold=(COLD,))
    assert observation is not None and observation.measured_share == pytest.approx(0.0)


def test_nothing_is_learned_where_it_would_be_a_guess() -> None:
    steps = Steps()
    steps.delays.planned(COLD, LoadStrategy.ASSISTED, 0.0)
    assert steps.run(0.2, cold=(COLD,)) is None  # nothing is known of steps that never wait
    steps.run(0.1)
    steps.delays.planned(COLD, LoadStrategy.ASSISTED, 0.0)
    assert steps.run(0.2, cold=(COLD,), has_others=False) is None
    steps.delays.planned(COLD, LoadStrategy.ASSISTED, 0.0)
    steps.delays.planned(RequestId(2), LoadStrategy.PIPELINED, 0.0)
    assert steps.run(0.2, cold=(COLD, RequestId(2))) is None  # of two strategies
    steps.delays.planned(COLD, LoadStrategy.ASSISTED, 0.0)
    assert steps.run(0.2) is None  # planned, but not let in
    assert steps.run(0.2, cold=(COLD,)) is None  # nor is that plan for the step after


def test_a_step_begins_when_the_one_before_it_ends() -> None:
    delays = DelayTracker()
    for number in (1, 2):
        if number == 2:
            delays.planned(COLD, LoadStrategy.PIPELINED, 0.0)
        cold = (COLD,) if number == 2 else ()
        delays.closed(StepId(number), cold, 0.1, 5.0, has_others=True)
    assert delays.ended(StepId(1), 5.1) is None
    observation = delays.ended(StepId(2), 5.2)
    assert observation is not None and observation.measured_share == pytest.approx(0.0)


def test_steps_that_were_given_up_are_forgotten() -> None:
    """Otherwise a late result would be compared with outdated times."""
    delays = DelayTracker()
    delays.closed(StepId(1), (), 0.1, 0.0, has_others=True)
    delays.ended(StepId(1), 0.1)
    delays.planned(COLD, LoadStrategy.PIPELINED, 0.0)
    for number, cold in ((2, (COLD,)), (3, ())):
        delays.closed(StepId(number), cold, 0.1, 0.1, has_others=True)
    delays.ended(StepId(3), 0.2)
    assert delays.ended(StepId(2), 0.3) is None
