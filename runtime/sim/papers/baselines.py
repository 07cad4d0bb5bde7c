"""Baselines of Toppings, section 7.1, as machines."""

from collections.abc import Sequence
from dataclasses import replace

from ....profiles.models import LinkModel
from ..machines import SimulatedMachine


def _cached(machine: SimulatedMachine, ranks: Sequence[int]) -> SimulatedMachine:
    """CACHED: the device has room for all adapters, and a load takes no time."""
    model = replace(machine.model, link=LinkModel(bytes_per_s=1e18, latency_s=0.0), load_s=0.0)
    memory_bytes = machine.memory_bytes + sum(ranks) * machine.adapter_bytes_per_rank
    return replace(
        machine, model=model, memory_bytes=memory_bytes, file_bytes_per_s=1e18, separate_assisted_rows=False
    )


def _serial(machine: SimulatedMachine, ranks: Sequence[int]) -> SimulatedMachine:
    """As S-LoRA: a load begins after the step, and the next step after the load."""
    return replace(machine, loads_between_steps=True)


BASELINES = {"cached": _cached, "serial": _serial}
