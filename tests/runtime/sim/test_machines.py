"""Machines to simulate: their figures are those of the recipe, and those of the papers."""

import pytest
from corun.profiles.step_time import forward_s
from corun.runtime.coldstart.cold import EMPTY, AdapterShape, ColdRequest, layer_times
from corun.runtime.sim.machines import Factors, slowed
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.papers.shapes import LLAMA_8B


def test_the_hand_set_machines_take_what_they_are_set_to() -> None:
    machine = MACHINES["a40-llama7b"]
    adapter = machine.adapter_facts("one", 64)
    assert adapter.num_bytes == 96 * 2**20
    # A chunk of 300 tokens behind 100, and two rows that decode.
    step_s = forward_s(machine.model, (300, 1, 1), (100, 9, 99), (adapter.num_bytes, 0, 2**19 * 24))
    prefill_s = 300 * 0.2e-3 + 300 * 64 * 1.2e-6 + 7e-9 * (300 * 100 + 300 * 301 / 2)
    decode_s = 1e-6 * (10 + 100) + 4e-6 * 8
    assert step_s == pytest.approx(12e-3 + 3 * 0.05e-3 + prefill_s + decode_s)
    alone_s = forward_s(machine.model, (1,), (0,), (0,))
    assert alone_s == pytest.approx(12e-3 + 23e-3 + 0.05e-3 + 1e-6)
    assert machine.num_blocks * machine.block_size == 28 * 2**30 // 2**19
    assert MACHINES["a40-llama8b"].adapter_facts("one", 10).num_bytes == 51_000_000


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rank", [1, 8, 128])
def test_layer_groups_hold_all_of_an_adapter(name: str, rank: int) -> None:
    facts = MACHINES[name].adapter_facts("one", rank)
    assert facts.layers is not None
    copied_bytes, page_bytes = sum(facts.layers.group_bytes), MACHINES[name].block_bytes
    if MACHINES[name].has_pages:
        assert facts.num_bytes == sum(facts.run_pages) * page_bytes
        assert 0 <= facts.num_bytes - copied_bytes <= page_bytes + copied_bytes / 100
    else:
        assert facts.num_bytes == copied_bytes
    num_layers = MACHINES[name].model.num_layers
    assert len(facts.layers.group_of_layer) == num_layers == len(facts.host_bytes)
    assert all(size % 4096 == 0 for size in facts.host_bytes)


def step_s(name: str, *rows: tuple[int, int, int]) -> float:
    """Of rows of so many tokens, behind so many, with adapters of such ranks."""
    machine = MACHINES[name]
    tokens, starts, ranks = zip(*rows, strict=True)
    sizes = [rank * machine.adapter_bytes_per_rank for rank in ranks]
    return forward_s(machine.model, tokens, starts, sizes)


def test_an_a100_takes_what_toppings_measured() -> None:
    prefill_s = [step_s("a100-llama2-7b", (tokens, 0, 0)) for tokens in (256, 1024)]
    assert prefill_s == pytest.approx([44e-3, 90e-3], rel=1e-3)
    for name, expected in (
        ("a100-llama2-7b", [34.8e-3, 35.8e-3]),
        ("a100-llama2-7b-exact", [35.3e-3, 35.9e-3]),
    ):
        rows = [[(1, 50, rank)] * number for number, rank in ((24, 32), (16, 64))]
        assert [step_s(name, *each) for each in rows] == pytest.approx(expected, rel=1e-3)
    # One row of a larger rank makes the others as slow as itself, or only itself.
    small, large = (1, 9, 32), (1, 9, 64)
    padded_s = step_s("a100-llama2-7b", *[small] * 24, large)
    assert padded_s == pytest.approx(31.8e-3 + 25 * 64 * 3.9e-6)
    exact_s = step_s("a100-llama2-7b-exact", *[small] * 24, large)
    assert exact_s == pytest.approx(33.5e-3 + (24 * 32 + 64) * 2.34e-6)


@pytest.mark.parametrize(("num_tokens", "expected_s"), [(64, 61e-3), (256, 126e-3)])
def test_workers_beside_an_a100_take_what_toppings_measured(num_tokens: int, expected_s: float) -> None:
    machine = MACHINES["a100-llama2-7b"]
    facts = machine.adapter_facts("one", 64)
    assert facts.layers is not None and facts.num_bytes == 96 * 2**20
    request = ColdRequest(
        num_tokens=num_tokens,
        adapter=AdapterShape(facts.num_bytes, facts.layers.rank_sums),
        ready_s=(9.0,) * 32,
        max_chunk_tokens=num_tokens,
        num_workers=machine.model.num_workers,
    )
    times = layer_times(machine.model, request, num_tokens, EMPTY)
    assert sum(times.assisted_s) == pytest.approx(expected_s, rel=1e-6)


def test_four_a100s_take_what_is_set_after_loraserve() -> None:
    large, small = (step_s("tp4-llama7b-exact", (2000, 0, rank)) for rank in (128, 8))
    assert large / small == pytest.approx(2.6, abs=0.02)
    assert large == pytest.approx(10e-3 + 2000 * 90e-6 * 3)
    light = [step_s("tp4-llama7b-light", (2000, 0, rank)) for rank in (128, 8)]
    assert light[0] / light[1] == pytest.approx(1.18, abs=0.01)
    rows = [(1000, 0, 8), (1, 99, 128), (1, 399, 8)]
    keys_s = 0.35e-6 * (100 + 400)
    padded_s = step_s("tp4-llama7b-padded", *rows)
    assert padded_s == pytest.approx(10e-3 + 1002 * 90e-6 * 3 + keys_s)
    exact_s = step_s("tp4-llama7b-exact", *rows)
    ranks_of_tokens = 1001 * 8 + 128
    assert exact_s == pytest.approx(10e-3 + 90e-6 * (1002 + 2 * ranks_of_tokens / 128) + keys_s)
    assert MACHINES["tp4-llama7b-padded"].num_blocks * 16 == 100_000


def test_a_gpu_takes_the_longer_of_launching_and_reading() -> None:
    """Adapters cost launches where the host is slower, and only their bytes where the device is."""
    once_s = 7 * 18e-6 + 20e-6 + 32 * 0.02e-3  # the sampler, its wait, and the rows
    shares = {}
    for name, bytes_per_s in (("a10-llama8b", 600e9), ("h100-llama8b", 3.35e12)):
        base_s, with_s = (step_s(name, *[(1, 511, rank)] * 32) for rank in (0, 16))
        keys_s = 32 * 512 * MACHINES[name].kv_bytes_per_token / bytes_per_s
        read_s = 2 * 32 * LLAMA_8B.layer_values / bytes_per_s
        launch_s = 303 * 18e-6
        assert base_s == pytest.approx(max(read_s, launch_s) + keys_s + once_s)
        adapters_s = 32 * 16 * 5_100_000 / bytes_per_s
        launch_s += 256 * 34e-6
        assert with_s == pytest.approx(max(read_s, launch_s) + keys_s + once_s + adapters_s)
        shares[name] = read_s / launch_s
    assert shares["a10-llama8b"] > 1 > shares["h100-llama8b"]
    h100 = MACHINES["h100-llama8b"]
    assert h100.model.invocation_s == pytest.approx(97.5e-6)
    assert (h100.max_num_batched_tokens, h100.separate_assisted_rows) == (2048, True)


def test_machines_that_nobody_measured_say_so_and_are_larger_or_smaller() -> None:
    assert MACHINES["a100-80gb-llama13b-scaled"].kv_bytes_per_token == 40 * 5120 * 4
    for name, of_7b in (
        ("a100-80gb-llama30b-scaled", "a100-llama2-7b-exact"),
        ("tp4-llama70b-padded-scaled", "tp4-llama7b-padded"),
    ):
        assert step_s(name, (256, 0, 8)) > 3.0 * step_s(of_7b, (256, 0, 8))
        assert step_s(name, (1, 9, 8)) > 2.0 * step_s(of_7b, (1, 9, 8))
    blocks = [MACHINES[f"a100-{gb}llama7b-scaled"].num_blocks for gb in ("24gb-", "48gb-")]
    assert 0 < blocks[0] < blocks[1] < MACHINES["a100-llama2-7b"].num_blocks


def test_a_slower_machine_pads_as_before() -> None:
    model = MACHINES["a100-llama2-7b"].model
    twice = slowed(model, Factors(step=2.0))
    rows = ((1, 1), (5, 9), (8 * 2**20, 2**20))
    assert twice.lora.is_padded
    assert forward_s(twice, *rows) == pytest.approx(2.0 * forward_s(model, *rows))
