"""What papers have for simulations: machines, workloads and traces. Imported on use."""

from collections.abc import Callable, Mapping, Sequence

from .draw_inputs import DrawInputs, Drawn, Ints
from .machines import SimulatedMachine
from .workload_spec import Recipe, WorkloadSpec


def named_machines() -> Mapping[str, SimulatedMachine]:
    """Return machines by name."""
    from .papers.machines import MACHINES

    return MACHINES


def recipes() -> Mapping[str, Recipe]:
    """Return workloads by name, with the machine that each is meant for."""
    from .papers.recipes import RECIPES

    return RECIPES


def baselines() -> Mapping[str, Callable[[SimulatedMachine, Sequence[int]], SimulatedMachine]]:
    """Return by name the machine of a baseline, made of a machine and the ranks of its adapters."""
    from .papers.machines import BASELINES

    return BASELINES


def draw_from_traces(spec: WorkloadSpec, inputs: DrawInputs) -> Drawn:
    """Draw a workload from traces. Raises ``TraceError``."""
    from .papers.trace_draws import draw_columns

    return draw_columns(spec, inputs)


def draw_names(inputs: DrawInputs, popularity: str) -> Ints:
    """Draw the name of each request's adapter from a trace. Raises ``TraceError``."""
    from .papers import trace_draws

    return trace_draws.draw_names(inputs, popularity)
