"""Machines to simulate: their figures are those of the recipe."""

import pytest
from corun.profiles.step_time import forward_s
from corun.runtime.sim.machines import MACHINES


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
    assert sum(facts.layers.group_bytes) == facts.num_bytes
    assert len(facts.layers.group_of_layer) == 32 == len(facts.host_bytes)
    assert all(size % 4096 == 0 for size in facts.host_bytes)
