"""Simulated runs in parallel: a follow-up run waits for no other run."""

from dataclasses import replace
from pathlib import Path

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.study import RunOutcome, SimulatedRun, Study
from corun.runtime.sim.workload_spec import WorkloadSpec


def _run(name: str, log: Path) -> SimulatedRun:
    return SimulatedRun(
        name=name,
        machine=MACHINES["a40-llama7b"],
        config=EngineConfig(),
        workload=WorkloadSpec(json_lines=str(log)),
        traces=None,
        horizon_s=60.0,
    )


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_run_may_be_followed_by_another_and_kept_ones_are_not_run_again(
    tmp_path: Path, num_processes: int
) -> None:
    log = tmp_path / "log.jsonl"
    line = '{"arrival_s": %d, "model": "x", "prompt_tokens": 8, "output_tokens": 2}\n'
    log.write_text("".join(line % second for second in range(3)))
    told: list[str] = []
    after: list[str] = []

    def then(one: SimulatedRun, outcome: RunOutcome) -> SimulatedRun | None:
        assert outcome.num_requests == 3
        after.append(one.name)
        return replace(one, name=one.name + "'") if len(one.name) < 3 else None

    runs = [_run(name, log) for name in "ab"]
    with Study(tmp_path, num_processes, told.append) as study:
        found = study.run([*runs, runs[0]], then)
        assert [one.name for one in found][:2] == ["a", "b"]
        assert {one.name for one in found} == {*after} == {"a", "a'", "a''", "b", "b'", "b''"}
        assert len(after) == 6 and all(after.index(x) < after.index(x + "'") for x in "ab")
        assert len(told) == 6 and told[-1].startswith("6 of 6 runs, 0 s left: ")
        again = study.run(runs, then)
        assert again == found and len(told) == 6 and len(after) == 12
