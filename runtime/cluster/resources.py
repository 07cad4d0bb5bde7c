"""The resources that agents take of machines, and how engines are spread over machines. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from ..errors import ConfigError


class Node(msgspec.Struct, frozen=True):
    """The resources of a machine."""

    num_cpus: float
    num_gpus: float


class AgentResources(msgspec.Struct, frozen=True):
    """The resources that an agent takes of a machine: all cores, and a GPU for each engine."""

    num_engines: int
    num_cpus: float
    num_gpus: float

    def by_ray_name(self) -> dict[str, float]:
        """Return the amounts above 0 by Ray's names of resources."""
        found = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: number for name, number in found.items() if number}


def spread(
    nodes: Iterable[Node], taken: Sequence[AgentResources], num_engines: int, *, on_gpus: bool
) -> list[AgentResources]:
    """Spread ``num_engines`` evenly over free machines; return the resources of each agent.

    A machine has one agent, which takes all of its cores, since it pins engines to them. Machines
    without cores, as a head should be, get no engines.

    Args:
        nodes: All machines.
        taken: The resources of agents that run already; their machines are left out.
        num_engines: To be started.
        on_gpus: Use only machines with GPUs, if there are any.

    Raises ``ConfigError`` if free machines have too few resources.
    """
    free = [node for node in nodes if node.num_cpus >= 1]
    for resources in taken:
        fitting = [node for node in free if _fits(resources, node)]
        if fitting:
            free.remove(min(fitting, key=lambda node: (node.num_cpus, node.num_gpus)))
    has_gpus = on_gpus and any(node.num_gpus >= 1 for node in free)
    free = sorted(
        [node for node in free if node.num_gpus >= 1 or not has_gpus],
        key=lambda node: (-node.num_gpus, -node.num_cpus),
    )
    room = [int(node.num_gpus) if has_gpus else num_engines for node in free]
    if sum(room) < num_engines:
        what = f"{sum(room)} GPUs" if has_gpus else "none with CPUs"
        raise ConfigError(
            f"--engines {num_engines} need machines without an agent, and those of Ray have "
            f"{what}; give fewer engines, or start Ray on more machines"
        )
    numbers = [0] * len(free)
    for _ in range(num_engines):
        open_nodes = [index for index, most in enumerate(room) if numbers[index] < most]
        numbers[min(open_nodes, key=lambda index: (numbers[index], index))] += 1
    return [
        AgentResources(number, node.num_cpus, number if has_gpus else 0.0)
        for node, number in zip(free, numbers, strict=True)
        if number
    ]


def _fits(resources: AgentResources, node: Node) -> bool:
    return resources.num_cpus <= node.num_cpus and resources.num_gpus <= node.num_gpus
