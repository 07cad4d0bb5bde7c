"""Assigns CPUs to the engine and the CPU workers, with reasons. Pure.

A worker spins while it has work, so it gets a physical core of its own, near the accelerator and
apart from the core that launches the accelerator's work.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..config.notations import format_cpus
from ..errors import ConfigError
from .facts import MachineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """The options for cores."""

    worker_cpus: tuple[int, ...] | None  # --cpu-cores; None = auto, () = none
    engine_cpus: tuple[int, ...] | None  # --engine-cores; None = auto
    off_reason: str | None  # why workers would be useless; None = they are useful


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """The CPUs of engine, workers and supervisor."""

    engine_cpus: tuple[int, ...]  # () = all CPUs that the process may use
    worker_cpus: tuple[int, ...]  # one worker each; () = co-execution is off
    supervisor_cpus: tuple[int, ...]  # of the process that watches the workers; () = no workers
    reasons: tuple[str, ...]  # for the start-up summary
    warnings: tuple[str, ...]  # problems of explicit lists


def plan_cores(machine: MachineFacts, request: CoreRequest, accelerator_node: int | None) -> CorePlan:
    """Choose the cores.

    Args:
        machine: Allowed CPUs, cores, NUMA nodes, quota.
        request: The options.
        accelerator_node: NUMA node of the accelerator; None = unknown, or there is only one.

    Raises:
        ConfigError: A list names a CPU that does not exist, is not allowed or is on both lists,
            or leaves no CPU to the engine.
    """
    _check_lists(machine, request)
    if request.off_reason is not None or request.worker_cpus == ():
        return _without_workers(request)
    node = _Node(machine, accelerator_node)
    engine = request.engine_cpus or _engine_core(machine, node, request.worker_cpus or ())
    if request.worker_cpus is not None:
        return CorePlan(
            engine_cpus=engine,
            worker_cpus=request.worker_cpus,
            supervisor_cpus=_supervisor_cpus(machine, engine, request.worker_cpus),
            reasons=(_placed(engine, request.worker_cpus), "set by --cpu-cores"),
            warnings=tuple(_warnings(machine, node, engine, request.worker_cpus)),
        )
    return _auto(machine, node, engine, is_engine_given=request.engine_cpus is not None)


def background_cpus(machine: MachineFacts, plan: CorePlan) -> tuple[int, ...]:
    """CPUs for helper threads of the engine, apart from its core; () = there is no choice.

    These threads read adapters and, on the CPU device, serve as its copy engines. They get free
    CPUs, or else those of the workers, which wait most of the time.
    """
    if not plan.engine_cpus:
        return ()
    others = set(machine.allowed_cpus) - _with_siblings(machine, plan.engine_cpus)
    return tuple(sorted(others.difference(plan.worker_cpus) or others))


def _without_workers(request: CoreRequest) -> CorePlan:
    reason = request.off_reason or "--cpu-cores is none"
    engine = request.engine_cpus or ()
    is_unused = request.off_reason is not None and request.worker_cpus
    return CorePlan(
        engine_cpus=engine,
        worker_cpus=(),
        supervisor_cpus=(),
        reasons=(*_pinned(engine), f"co-execution off: {reason}"),
        warnings=(f"--cpu-cores is ignored: {reason}",) if is_unused else (),
    )


class _Node:
    """The physical cores near the accelerator, cut to what this process may use."""

    def __init__(self, machine: MachineFacts, index: int | None) -> None:
        allowed = set(machine.allowed_cpus)
        near = [n for n in machine.numa_nodes if n.index == index]
        self.cpus = frozenset(allowed.intersection(near[0].cpus) if near else allowed)
        if self.cpus and near:
            self.where = f"on the accelerator's NUMA node {index}"
        elif near:
            self.cpus = frozenset(allowed)
            self.where = f"on any node, as no CPU of the accelerator's node {index} is allowed"
        elif len(machine.numa_nodes) > 1:
            self.where = "on any NUMA node, as the accelerator's is unknown"
        else:
            self.where = "on the only NUMA node"
        self.cores = _cut(machine, self.cpus)


def _cut(machine: MachineFacts, cpus: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the physical cores, cut to ``cpus``; CPUs without a known core are cores alone."""
    left = set(cpus)
    cores = [tuple(cpu for cpu in core if cpu in left) for core in machine.core_cpus]
    known = {cpu for core in cores for cpu in core}
    return sorted([core for core in cores if core] + [(cpu,) for cpu in left - known])


def _with_siblings(machine: MachineFacts, cpus: Iterable[int]) -> set[int]:
    """Return ``cpus`` and all CPUs that share a core with one of them."""
    found = set(cpus)
    return found.union(*(core for core in machine.core_cpus if found.intersection(core)))


def _engine_core(machine: MachineFacts, node: _Node, worker_cpus: tuple[int, ...]) -> tuple[int, ...]:
    """Choose a core for the engine: the first near the accelerator without workers."""
    taken = _with_siblings(machine, worker_cpus)
    for core in [*node.cores, *_cut(machine, machine.allowed_cpus)]:
        if not taken.intersection(core):
            return core
    rest = sorted(set(machine.allowed_cpus).difference(worker_cpus))
    if not rest:
        raise ConfigError(
            f"--cpu-cores is {format_cpus(worker_cpus)}, which leaves the engine none of the CPUs "
            f"{format_cpus(machine.allowed_cpus)} that this process may use"
        )
    return tuple(rest)


def _auto(machine: MachineFacts, node: _Node, engine: tuple[int, ...], *, is_engine_given: bool) -> CorePlan:
    taken = _with_siblings(machine, engine)
    free = [core[0] for core in node.cores if not taken.intersection(core)]
    limit = _worker_limit(machine)
    workers = tuple(free if limit is None else free[:limit])
    reasons = [f"one worker per physical core {node.where}, except the engine's"]
    if len(workers) < len(free):
        reasons.append(f"{len(workers)} of {len(free)} because of the {_quota(machine)}")
    if workers:
        return CorePlan(
            engine_cpus=engine,
            worker_cpus=workers,
            supervisor_cpus=_supervisor_cpus(machine, engine, workers),
            reasons=(_placed(engine, workers), *reasons),
            warnings=(),
        )
    if free:
        why = f"the {_quota(machine)} leaves no CPU to workers"
    else:
        why = f"there is no physical core {node.where} except the engine's"
    # Pinning the engine makes room for workers; without workers it would only take cores away.
    kept = engine if is_engine_given else ()
    return CorePlan(
        engine_cpus=kept,
        worker_cpus=(),
        supervisor_cpus=(),
        reasons=(*_pinned(kept), f"co-execution off: {why}"),
        warnings=(),
    )


def _supervisor_cpus(
    machine: MachineFacts, engine: tuple[int, ...], workers: tuple[int, ...]
) -> tuple[int, ...]:
    """Choose CPUs without engine and workers for the supervisor, or else the engine's."""
    busy = _with_siblings(machine, (*engine, *workers))
    return tuple(cpu for cpu in machine.allowed_cpus if cpu not in busy) or engine


def _pinned(engine: tuple[int, ...]) -> tuple[str, ...]:
    return (f"engine on CPU {format_cpus(engine)}",) if engine else ()


def _placed(engine: tuple[int, ...], workers: tuple[int, ...]) -> str:
    noun = "worker" if len(workers) == 1 else "workers"
    return f"engine on CPU {format_cpus(engine)}, {len(workers)} {noun} on {format_cpus(workers)}"


def _worker_limit(machine: MachineFacts) -> int | None:
    """The number of workers that may spin before the quota throttles the engine."""
    return None if machine.cpu_quota is None else max(0, math.floor(machine.cpu_quota) - 1)


def _quota(machine: MachineFacts) -> str:
    return f"CPU quota of {machine.cpu_quota:g}"


def _check_lists(machine: MachineFacts, request: CoreRequest) -> None:
    existing = {cpu for core in machine.core_cpus for cpu in core}.union(machine.allowed_cpus)
    for flag, cpus in (
        ("--cpu-cores", request.worker_cpus or ()),
        ("--engine-cores", request.engine_cpus or ()),
    ):
        for cpu in cpus:
            if cpu not in existing:
                raise ConfigError(
                    f"{flag} names CPU {cpu}, but this machine has {format_cpus(tuple(existing))}"
                )
            if cpu not in machine.allowed_cpus:
                raise ConfigError(
                    f"{flag} names CPU {cpu}, but this process may only use "
                    f"{format_cpus(machine.allowed_cpus)} (its affinity, or its cpuset)"
                )
    both = set(request.worker_cpus or ()).intersection(request.engine_cpus or ())
    if both:
        raise ConfigError(f"CPU {min(both)} is named by --cpu-cores and by --engine-cores")


def _warnings(
    machine: MachineFacts, node: _Node, engine: tuple[int, ...], workers: tuple[int, ...]
) -> Iterable[str]:
    """Yield warnings about lists that cause slowness."""
    near_engine = _with_siblings(machine, engine).intersection(workers)
    if near_engine:
        yield (
            f"workers on {format_cpus(tuple(near_engine))} share a physical core with the engine "
            "and will slow it down"
        )
    for core in _cut(machine, workers):
        if len(core) > 1:
            yield f"the workers on {format_cpus(core)} share one physical core"
    far = set(workers) - node.cpus
    if far:
        yield f"workers on {format_cpus(tuple(far))} are not {node.where}"
    limit = _worker_limit(machine)
    if limit is not None and len(workers) > limit:
        yield (
            f"--cpu-cores gives {len(workers)} workers, but the {_quota(machine)} is enough for "
            f"only {limit}: workers and engine will be throttled"
        )
