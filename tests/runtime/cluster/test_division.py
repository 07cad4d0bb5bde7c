"""Division of machines of all shapes: no CPU twice, near the device, or a refusal with counts."""

import pytest
from corun.runtime.cluster.division import EngineNeeds, MachineDivision, divide_machine
from corun.runtime.errors import ConfigError
from corun.runtime.machine.devices import VisibleDevice
from corun.runtime.machine.facts import MachineFacts
from hypothesis import given
from hypothesis import strategies as st
from support.machines import GIB, TWO_SOCKETS, machine


def divide(
    facts: MachineFacts,
    num_engines: int,
    *,
    devices: tuple[VisibleDevice, ...] = (),
    workers: bool = False,
    unpinned: bool = False,
    weights_bytes: int = 0,
) -> MachineDivision:
    needs = EngineNeeds(num_engines=num_engines, has_workers=workers, weights_bytes=weights_bytes)
    return divide_machine(facts, devices, needs, unpinned=unpinned)


def check_disjoint(division: MachineDivision, facts: MachineFacts) -> None:
    lists = [division.others_cpus]
    for share in division.shares:
        assert not set(share.engine_cpus).intersection(share.worker_cpus)
        assert {*share.engine_cpus, *share.worker_cpus} <= set(share.cpus)
        lists.append(share.cpus)
    named = [cpu for cpus in lists for cpu in cpus]
    assert len(named) == len(set(named))
    assert set(named) <= set(facts.allowed_cpus)
    assert division.others_cpus
    for core in facts.core_cpus:  # complete physical cores
        users = [index for index, cpus in enumerate(lists) if set(core).intersection(cpus)]
        assert len(users) <= 1


@pytest.mark.parametrize("workers", [False, True])
def test_two_engines_on_16_cpus_share_none(workers: bool) -> None:
    division = divide(TWO_SOCKETS, 2, workers=workers)
    check_disjoint(division, TWO_SOCKETS)
    near = [set(node.cpus) for node in TWO_SOCKETS.numa_nodes]
    assert all(set(division.shares[i].cpus) <= near[i] for i in range(2))
    if workers:
        assert [share.engine_cpus for share in division.shares] == [(0, 8), (4, 12)]
        assert [len(share.worker_cpus) for share in division.shares] == [2, 3]


def test_engines_sit_near_their_devices() -> None:
    devices = (VisibleDevice("GPU-a", 1), VisibleDevice("GPU-b", 1))
    division = divide(TWO_SOCKETS, 2, devices=devices, workers=True)
    check_disjoint(division, TWO_SOCKETS)
    assert [share.device for share in division.shares] == list(devices)
    assert [share.cpus for share in division.shares] == [(4, 5, 12, 13), (6, 7, 14, 15)]
    assert division.others_cpus == (0, 1, 2, 3, 8, 9, 10, 11)


def test_a_node_that_is_too_small_gives_way_to_all_of_them() -> None:
    devices = tuple(VisibleDevice(f"GPU-{i}", 0) for i in range(3))
    division = divide(TWO_SOCKETS, 3, devices=devices, workers=True)
    check_disjoint(division, TWO_SOCKETS)
    assert all(len(share.worker_cpus) == 1 for share in division.shares)


def test_a_quota_bounds_what_is_busy() -> None:
    facts = machine(tuple((i,) for i in range(16)), quota=8.0)
    division = divide(facts, 2, workers=True)
    check_disjoint(division, facts)
    assert all(len(share.cpus) == 4 for share in division.shares)
    with pytest.raises(ConfigError, match="CPU quota is 8"):
        divide(facts, 5, workers=True)


def test_too_few_cores_are_refused_with_the_count() -> None:
    two = machine(((0,), (1,)))
    with pytest.raises(ConfigError, match=r"--engines 2 needs 3 physical cores.*may use 2"):
        divide(two, 2)
    with pytest.raises(ConfigError, match=r"--engines 2 needs 5 physical cores.*--unpinned"):
        divide(two, 2, workers=True)


def test_unpinned_engines_share_all_and_say_so() -> None:
    division = divide(machine(((0,), (1,))), 3, unpinned=True)
    assert [share.cpus for share in division.shares] == [()] * 3
    assert {share.num_threads for share in division.shares} == {1}
    assert division.lines() == ("3 engines without workers, on shared cores (--unpinned)",)


def test_an_engine_has_a_device_to_itself() -> None:
    with pytest.raises(ConfigError, match="2 CUDA devices"):
        divide(TWO_SOCKETS, 3, devices=(VisibleDevice("a", 0), VisibleDevice("b", 1)))


def test_memory_is_shared_equally_beside_the_weights() -> None:
    division = divide(TWO_SOCKETS, 2, weights_bytes=8 * GIB)
    assert [share.memory_bytes for share in division.shares] == [16 * GIB] * 2
    with pytest.raises(ConfigError, match="for weights alone"):
        divide(TWO_SOCKETS, 2, weights_bytes=24 * GIB)
    beside = divide(TWO_SOCKETS, 2, devices=(VisibleDevice("a", 0), VisibleDevice("b", 1)))
    assert [share.host_bytes for share in beside.shares] == [6 * GIB] * 2


def test_it_says_which_core_is_whose() -> None:
    assert divide(TWO_SOCKETS, 2, workers=True).lines() == (
        "engine 0: CPU 0,8, workers on 1-2, 24 GiB",
        "engine 1: CPU 4,12, workers on 5-7, 24 GiB",
        "gateways, controller and agent: CPU 3,11",
    )


@given(
    num_cores=st.integers(1, 24),
    threads=st.integers(1, 2),
    num_nodes=st.integers(1, 3),
    num_engines=st.integers(1, 6),
    workers=st.booleans(),
    near=st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=6, max_size=6),
    hidden=st.sets(st.integers(0, 47), max_size=8),
)
def test_no_cpu_is_on_two_lists(
    num_cores: int,
    threads: int,
    num_nodes: int,
    num_engines: int,
    workers: bool,
    near: list[int | None],
    hidden: set[int],
) -> None:
    cores = tuple(tuple(core + t * num_cores for t in range(threads)) for core in range(num_cores))
    nodes = tuple(
        tuple(cpu for i, core in enumerate(cores) if i % num_nodes == node for cpu in core)
        for node in range(num_nodes)
    )
    allowed = tuple(sorted({cpu for core in cores for cpu in core} - hidden))
    facts = machine(cores, nodes=nodes, allowed=allowed)
    devices = tuple(VisibleDevice(str(i), node) for i, node in enumerate(near)) if near[0] else ()
    least = 2 if workers else 1
    usable = sum(bool(set(core).intersection(allowed)) for core in cores)
    try:
        division = divide(facts, num_engines, devices=devices, workers=workers)
    except ConfigError:
        assert usable < least * num_engines + 1
        return
    check_disjoint(division, facts)
    for share in division.shares:
        assert len(share.worker_cpus) >= workers and share.engine_cpus
