"""Facts of machines of all shapes."""

from corun.runtime.machine.facts import MachineFacts, NumaNode

GIB = 2**30
Cpus = tuple[int, ...]


def machine(
    cores: tuple[Cpus, ...],
    *,
    nodes: tuple[Cpus, ...] = (),
    allowed: Cpus | None = None,
    quota: float | None = None,
) -> MachineFacts:
    """One of these cores, each the CPUs that share it."""
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    return MachineFacts(
        memory_total_bytes=64 * GIB,
        memory_limit_bytes=None,
        memory_available_bytes=48 * GIB,
        allowed_cpus=cpus if allowed is None else allowed,
        cpu_quota=quota,
        cpu_model="x",
        numa_nodes=tuple(NumaNode(i, node) for i, node in enumerate(nodes or (cpus,))),
        core_cpus=cores,
        shm_total_bytes=0,
        shm_available_bytes=0,
    )


# 16 CPUs: two sockets of four cores with two threads each, numbered as Linux does.
TWO_SOCKETS = machine(
    tuple((i, i + 8) for i in range(8)), nodes=((*range(4), *range(8, 12)), (*range(4, 8), *range(12, 16)))
)
