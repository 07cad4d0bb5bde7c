"""Token budgets, layer groups and crossovers from curves."""

from corun.profiles.curve import Curve, CurveFamily
from corun.profiles.derive import crossovers, min_group_bytes, tokens_per_worker
from corun.profiles.models import GroupModel, LinkModel


def _group(base: Curve, delta: Curve) -> GroupModel:
    return GroupModel("q_proj", base, CurveFamily((48.0,), (delta,)))


def test_the_budget_is_what_one_core_hides_behind_the_base_products() -> None:
    base = Curve((1.0, 1001.0), (1e-3, 2e-3))  # 1 ms and 1 us per token
    delta = Curve((1.0, 1001.0), (1e-5, 1.001e-2))  # 10 us per token
    budget = tokens_per_worker([_group(base, delta)], [48], 4096)
    assert 100 <= budget <= 112  # 1e-3 + 1e-6 n = 1e-5 n at n = 111


def test_a_core_that_never_keeps_up_gets_slices_at_its_best_rate() -> None:
    base = Curve((1.0, 1001.0), (1e-6, 1e-3))
    delta = Curve((1.0, 17.0, 1001.0), (1e-3, 1e-3, 6.25e-2))  # flat up to 16 tokens
    budget = tokens_per_worker([_group(base, delta)], [48], 4096)
    assert 14 <= budget <= 18


def test_groups_without_ranks_do_not_count() -> None:
    slow = _group(Curve((1.0,), (1e-6,)), Curve((1.0,), (1.0,)))
    fast = _group(Curve((1.0,), (1.0,)), Curve((1.0,), (1e-6,)))
    assert tokens_per_worker([slow, fast], [0, 48], 512) == 512


def test_a_budget_is_no_more_than_a_step_computes() -> None:
    fast = _group(Curve((1.0,), (1.0,)), Curve((1.0,), (1e-6,)))
    assert tokens_per_worker([fast], [48], 100) == 100


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
