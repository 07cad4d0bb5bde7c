"""``place_engine`` on this machine. Each call runs in a thread, with which its affinity ends."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.placement import Placement, place_engine
from corun.runtime.errors import ConfigError
from corun.runtime.machine.facts import read_machine_facts

ALLOWED = tuple(sorted(os.sched_getaffinity(0)))
FIRST = str(ALLOWED[0])


def place(config: EngineConfig) -> tuple[Placement, set[int]]:
    """Return the placement, and the CPUs of its thread afterwards."""

    def run() -> tuple[Placement, set[int]]:
        return place_engine(config, read_machine_facts()), os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def test_the_cpu_device_keeps_all_its_cores() -> None:
    placement, runs_on = place(EngineConfig(device="cpu"))
    assert placement.line == "co-execution off: the model runs on the CPU itself"
    assert tuple(sorted(runs_on)) == placement.machine.allowed_cpus == ALLOWED


def test_engine_cores_pin_the_engine_and_count_as_its_cpus() -> None:
    placement, runs_on = place(EngineConfig(device="cpu", engine_cores=FIRST))
    assert runs_on == {ALLOWED[0]}
    assert placement.machine.num_cpus == 1
    assert placement.line.startswith(f"engine on CPU {FIRST}; co-execution off")


def test_a_worker_list_without_use_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    placement, _ = place(EngineConfig(device="cpu", cpu_cores=FIRST))
    assert placement.plan.worker_cpus == ()
    assert "--cpu-cores is ignored: the model runs on the CPU itself" in caplog.text


def test_a_forbidden_pinning_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(pid: int, cpus: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    placement, runs_on = place(EngineConfig(device="cpu", engine_cores=FIRST))
    assert placement.machine.allowed_cpus == tuple(sorted(runs_on)) == ALLOWED
    if len(ALLOWED) > 1:
        assert "cannot pin the engine as planned" in caplog.text
        assert "but the engine runs on" in placement.line


def test_absent_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="--engine-cores names CPU 60000"):
        place(EngineConfig(device="cpu", engine_cores="60000"))


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs a CPU for a worker")
def test_a_paced_link_makes_room_for_workers() -> None:
    config = EngineConfig(device="cpu", link_gib_per_s=1.0)
    placement, runs_on = place(config)
    assert placement.plan.worker_cpus
    assert not runs_on.intersection(placement.plan.worker_cpus)
    placement, runs_on = place(replace(config, engine_cores=FIRST, cpu_cores=str(ALLOWED[1])))
    assert (placement.plan.worker_cpus, runs_on) == ((ALLOWED[1],), {ALLOWED[0]})
    placement, runs_on = place(replace(config, cpu_cores="none"))
    assert placement.line == "co-execution off: --cpu-cores is none"
    assert tuple(sorted(runs_on)) == ALLOWED
