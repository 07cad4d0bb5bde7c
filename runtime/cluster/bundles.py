"""What agents take of machines: how engines are spread over those that there are. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from ..errors import ConfigError


class Node(msgspec.Struct, frozen=True):
    """What a machine has for all."""

    num_cpus: float
    num_gpus: float


class Bundle(msgspec.Struct, frozen=True):
    """What an agent takes of one: all of its cores, and a device for each engine."""

    num_engines: int
    num_cpus: float
    num_gpus: float

    def resources(self) -> dict[str, float]:
        """By the names of Ray, and without what is none."""
        found = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: number for name, number in found.items() if number}


def spread(
    nodes: Iterable[Node], taken: Sequence[Bundle], num_engines: int, *, on_gpus: bool
) -> list[Bundle]:
    """Return what agents take for so many engines, an agent a machine, engines evenly.

    An agent pins engines to cores, so that none of its machine's are left to others; machines
    without cores, as a head should be, get none. ``taken``: of machines that have an agent.
    ``on_gpus``: engines go to machines with GPUs, if there are any.

    Raises ``ConfigError`` if there is too little for so many.
    """
    free = [node for node in nodes if node.num_cpus >= 1]
    for bundle in taken:
        fitting = [node for node in free if _fits(bundle, node)]
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
            f"{what}; give fewer, or start Ray on more"
        )
    numbers = [0] * len(free)
    for _ in range(num_engines):
        open_nodes = [index for index, most in enumerate(room) if numbers[index] < most]
        numbers[min(open_nodes, key=lambda index: (numbers[index], index))] += 1
    return [
        Bundle(number, node.num_cpus, number if has_gpus else 0.0)
        for node, number in zip(free, numbers, strict=True)
        if number
    ]


def _fits(bundle: Bundle, node: Node) -> bool:
    return bundle.num_cpus <= node.num_cpus and bundle.num_gpus <= node.num_gpus
