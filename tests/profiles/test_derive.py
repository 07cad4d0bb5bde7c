"""Token budgets, layer groups and crossovers from curves."""

from dataclasses import replace

from corun.cpu_workers.teams import JobModel
from corun.profiles.curve import Curve
from corun.profiles.derive import crossovers, min_group_bytes, tokens_per_worker
from corun.profiles.models import GroupModel, LinkModel, MachineModel
from support.simulation import MODEL


def _model(base: Curve, *, read_s: float = 0.0, multiply_s: float = 0.0) -> MachineModel:
    """One input group; at a rank sum of 48 a core reads and multiplies in these times."""
    groups = (GroupModel("q_proj", base, 1 / 48),)
    return replace(MODEL, groups=groups, job=JobModel(read_s, multiply_s))


def test_tokens_per_core_are_what_it_hides_behind_the_base_products() -> None:
    base = Curve((1.0, 1001.0), (1e-3, 2e-3))  # 1 ms and 1 us per token
    budget = tokens_per_worker(_model(base, multiply_s=1e-5), [48], 4096)
    assert 100 <= budget <= 112  # 1e-3 + 1e-6 n = 1e-5 n at n = 111


def test_a_core_that_never_keeps_up_has_its_best_rate() -> None:
    base = Curve((1.0, 1001.0), (1e-6, 1e-3))
    model = _model(base, read_s=1e-3, multiply_s=6.25e-5)  # flat up to 16 tokens
    assert 14 <= tokens_per_worker(model, [48], 4096) <= 18


def test_groups_without_ranks_do_not_count() -> None:
    model = _model(Curve((1.0,), (1.0,)), read_s=1e-6)
    slow = GroupModel("o_proj", Curve((1.0,), (1e-9,)), 1.0)
    assert tokens_per_worker(replace(model, groups=(slow, *model.groups)), [0, 48], 512) == 512


def test_tokens_per_core_are_no_more_than_a_step_computes() -> None:
    assert tokens_per_worker(_model(Curve((1.0,), (1.0,)), read_s=1e-6), [48], 100) == 100


def test_crossovers_end_with_what_was_measured() -> None:
    small = Curve((1.0, 8.0), (1.0, 8.0))
    large = Curve((1.0, 8.0, 16.0), (10.0, 10.0, 10.0))
    assert crossovers(["numba", "torch"], [small, large]) == ((1, "numba"),)


def test_layer_groups_outweigh_the_latency() -> None:
    link = LinkModel(bytes_per_s=1e9, latency_s=1e-5)
    num_bytes = min_group_bytes(link)
    assert link.latency_s / (link.latency_s + num_bytes / link.bytes_per_s) <= 0.1 + 1e-9
    assert min_group_bytes(LinkModel(1e9, 0.0)) == 1


def test_crossovers_name_the_fastest_from_each_count_on() -> None:
    small = Curve((1.0, 101.0), (1.0, 101.0))
    large = Curve((1.0, 101.0), (10.0, 60.0))
    found = crossovers(["numba", "torch"], [small, large])
    assert found[0] == (1, "numba")
    assert found[1][1] == "torch"
    assert 17 <= found[1][0] <= 22
