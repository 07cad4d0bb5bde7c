"""Which cores are chosen on machines of all shapes, and what is refused or warned of."""

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.machine.cores import CorePlan, CoreRequest, background_cpus, plan_cores
from corun.runtime.machine.facts import MachineFacts
from hypothesis import given
from hypothesis import strategies as st
from support.machines import TWO_SOCKETS, Cpus, machine


def plan(
    facts: MachineFacts,
    workers: Cpus | None = None,
    engine: Cpus | None = None,
    node: int | None = None,
    off: str | None = None,
) -> CorePlan:
    return plan_cores(facts, CoreRequest(worker_cpus=workers, engine_cpus=engine, off_reason=off), node)


def test_auto_takes_one_thread_of_each_core_near_the_accelerator() -> None:
    chosen = plan(TWO_SOCKETS, node=1)
    assert chosen.engine_cpus == (4, 12)  # a whole core: its sibling must not be spun on
    assert chosen.worker_cpus == (5, 6, 7)
    assert chosen.supervisor_cpus == (0, 1, 2, 3, 8, 9, 10, 11)
    assert "NUMA node 1" in chosen.reasons[1]


def test_threads_that_help_the_engine_leave_its_core_alone() -> None:
    assert background_cpus(TWO_SOCKETS, plan(TWO_SOCKETS, node=1)) == (0, 1, 2, 3, 8, 9, 10, 11, 13, 14, 15)
    two_cores = machine(((0,), (1,)))
    # The workers' cores are better than the engine's.
    assert background_cpus(two_cores, plan(two_cores, (1,), (0,))) == (1,)
    assert background_cpus(two_cores, plan(two_cores, (), (0, 1))) == ()
    assert background_cpus(two_cores, plan(two_cores, ())) == ()  # the engine is not pinned


def test_auto_leaves_a_given_engine_core_and_its_sibling() -> None:
    chosen = plan(TWO_SOCKETS, engine=(13,), node=1)
    assert chosen.engine_cpus == (13,)
    assert chosen.worker_cpus == (4, 6, 7)


def test_auto_respects_the_cpuset() -> None:
    facts = machine(TWO_SOCKETS.core_cpus, nodes=((0, 1, 2, 3, 8, 9, 10, 11), (4, 5)), allowed=(1, 2, 10, 11))
    chosen = plan(facts, node=0)
    assert (chosen.engine_cpus, chosen.worker_cpus) == ((1,), (2, 11))
    away = plan(facts, node=1)
    assert (away.engine_cpus, away.worker_cpus) == ((1,), (2, 11))
    assert "no CPU of the accelerator's node 1 is allowed" in away.reasons[1]


def test_without_a_known_node_any_core_may_serve_and_it_says_so() -> None:
    chosen = plan(TWO_SOCKETS)
    assert chosen.worker_cpus == tuple(range(1, 8))
    assert "the accelerator's is unknown" in chosen.reasons[1]


@pytest.mark.parametrize(
    ("quota", "workers"), [(None, 7), (16.0, 7), (5.0, 4), (4.9, 3), (2.0, 1), (1.9, 0), (0.5, 0)]
)
def test_a_quota_keeps_one_cpu_for_the_engine(quota: float | None, workers: int) -> None:
    chosen = plan(machine(TWO_SOCKETS.core_cpus, quota=quota))
    assert len(chosen.worker_cpus) == workers
    assert any("quota" in reason for reason in chosen.reasons) == (workers < 7)
    if not workers:
        assert chosen.engine_cpus == ()
        assert "co-execution off: the CPU quota" in chosen.reasons[-1]


def test_one_core_is_none_for_workers() -> None:
    chosen = plan(machine(((0, 1),)))
    assert (chosen.engine_cpus, chosen.worker_cpus) == ((), ())
    assert "co-execution off: there is no physical core" in chosen.reasons[0]
    pinned = plan(machine(((0, 1),)), engine=(1,))
    assert pinned.engine_cpus == (1,)
    assert "engine on CPU 1" in pinned.reasons


def test_two_cores_are_one_each() -> None:
    two = machine(((0,), (1,)))
    for chosen in (plan(two), plan(two, workers=(1,), engine=(0,)), plan(two, workers=(1,))):
        assert (chosen.engine_cpus, chosen.worker_cpus) == ((0,), (1,))
        assert chosen.supervisor_cpus == (0,)
        assert chosen.warnings == ()
        assert "engine on CPU 0, 1 worker on 1" in chosen.reasons


def test_workers_on_the_first_cores_move_the_engine() -> None:
    assert plan(TWO_SOCKETS, workers=(0, 1), node=0).engine_cpus == (2, 10)
    assert plan(TWO_SOCKETS, workers=(0, 1, 2, 3), node=0).engine_cpus == (4, 12)


def test_the_engine_takes_what_a_list_of_all_cores_leaves() -> None:
    chosen = plan(TWO_SOCKETS, workers=tuple(range(8)))
    assert chosen.engine_cpus == tuple(range(8, 16))
    assert any("share a physical core with the engine" in text for text in chosen.warnings)


def test_off_pins_only_an_engine_that_was_given_cores() -> None:
    for chosen in (plan(TWO_SOCKETS, off="no accelerator"), plan(TWO_SOCKETS, workers=())):
        assert (chosen.engine_cpus, chosen.worker_cpus) == ((), ())
        assert chosen.warnings == ()
    assert plan(TWO_SOCKETS, off="no accelerator").reasons == ("co-execution off: no accelerator",)
    chosen = plan(TWO_SOCKETS, workers=(1,), engine=(0,), off="no accelerator")
    assert (chosen.engine_cpus, chosen.worker_cpus) == ((0,), ())
    assert chosen.warnings == ("--cpu-cores is ignored: no accelerator",)


@pytest.mark.parametrize(
    ("workers", "engine", "message"),
    [
        ((99,), None, "--cpu-cores names CPU 99, but this machine has 0-3"),
        ((1,), (77,), "--engine-cores names CPU 77, but this machine has 0-3"),
        ((3,), None, "--cpu-cores names CPU 3, but this process may only use 0-2"),
        ((1, 2), (0, 1), "CPU 1 is named by --cpu-cores and by --engine-cores"),
        ((0, 1, 2), None, "leaves the engine none of the CPUs 0-2"),
    ],
)
def test_impossible_lists_are_refused(workers: Cpus, engine: Cpus | None, message: str) -> None:
    facts = machine(((0,), (1,), (2,), (3,)), allowed=(0, 1, 2))
    with pytest.raises(ConfigError, match=message):
        plan(facts, workers, engine)


def test_slow_lists_are_warned_of() -> None:
    facts = machine(TWO_SOCKETS.core_cpus, nodes=((*range(4), *range(8, 12)), (4, 5, 6, 7)), quota=4.0)
    chosen = plan(facts, workers=(1, 8, 2, 10, 5), engine=(0,), node=0)
    assert chosen.worker_cpus == (1, 8, 2, 10, 5)  # it is done as it was said
    assert [text.partition(" ")[0] for text in chosen.warnings] == [
        "workers",
        "the",
        "workers",
        "--cpu-cores",
    ]
    assert "workers on 8 share a physical core with the engine" in chosen.warnings[0]
    assert "the workers on 2,10 share one physical core" in chosen.warnings[1]
    assert "workers on 5 are not on the accelerator's NUMA node 0" in chosen.warnings[2]
    assert "5 workers, but the CPU quota of 4 is enough for only 3" in chosen.warnings[3]


@given(st.integers(1, 12), st.integers(1, 2), st.data())
def test_auto_never_shares_a_core(num_cores: int, threads: int, data: st.DataObject) -> None:
    cores = tuple(tuple(range(i, num_cores * threads, num_cores)) for i in range(num_cores))
    all_cpus = list(range(num_cores * threads))
    allowed = tuple(sorted(data.draw(st.sets(st.sampled_from(all_cpus), min_size=1))))
    chosen = plan(machine(cores, allowed=allowed))
    busy = [*chosen.worker_cpus, *chosen.engine_cpus]
    assert set(busy) <= set(allowed)
    used = [core for core in cores if set(core) & set(busy)]
    if chosen.worker_cpus:
        assert len(used) == len(chosen.worker_cpus) + 1
    else:
        assert not chosen.engine_cpus
        assert len([core for core in cores if set(core) & set(allowed)]) == 1
