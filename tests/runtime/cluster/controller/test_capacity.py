"""The operating capacity of live engines: what is simulated for it, and what is kept."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from corun.profiles.models import MachineModel
from corun.runtime.cluster.controller import simulated_capacity
from corun.runtime.cluster.controller.capacity import CapacityTask, capacity_of
from corun.runtime.cluster.controller.simulated_capacity import find_and_keep
from corun.runtime.errors import CorunError
from corun.runtime.sim.capacity import NoLimitError
from support.fake_cluster import profile_of


def task_of(folder: Path, **fields: Any) -> CapacityTask:
    profile = msgspec.structs.replace(profile_of(), **fields)
    return CapacityTask(profile, 1000, (4,), 2.0, str(folder))


def test_capacity_is_found_for_an_engine_as_its_profile_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def find(setup: Any, ranks: Any, *, slo: Any, **_: Any) -> tuple[tuple[int, float], ...]:
        calls.append((setup, ranks, slo))
        if slo is not None and len(calls) == 1:
            raise NoLimitError("no limit")
        return tuple((rank, 10.0 * rank) for rank in ranks)

    monkeypatch.setattr(simulated_capacity, "find_capacity", find)
    task = task_of(tmp_path)
    find_and_keep(task)
    # An engine without a load limit counts with its maximum throughput.
    assert [one[2] is None for one in calls] == [False, True] and calls[0][2].ttft_s == 2.0
    setup, ranks, _ = calls[0]
    assert ranks == [4, 8, 16, 32, 64, 128]
    assert (setup.machine.num_blocks, setup.machine.max_num_seqs) == (1000 // 16, 16)
    assert setup.workload.lengths.prompt_divisor == 8  # prompts fit into 2048 tokens
    assert asyncio.run(capacity_of(task))[4] == 40.0


def test_a_profile_that_is_learned_has_its_capacity_found_once(tmp_path: Path) -> None:
    learned = task_of(tmp_path, is_measured=False)
    later = task_of(tmp_path, is_measured=False, machine=_slower(learned))
    assert learned.path == later.path
    assert task_of(tmp_path).path != task_of(tmp_path, machine=_slower(learned)).path


def _slower(task: CapacityTask) -> MachineModel:
    return replace(task.profile.machine, turn_s=1.0)


def test_without_an_answer_there_is_no_capacity(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file, where runs would be kept")
    with pytest.raises(
        CorunError, match="found no operating capacity: the search ended with status 1"
    ):
        asyncio.run(capacity_of(task_of(folder)))
