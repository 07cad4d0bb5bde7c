"""Makes simulated machines, engines and clusters of options of ``corun serve`` and a profile."""

import logging
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ...profiles.find import state_directory
from ...profiles.models import LinkModel
from ...profiles.profile import Profile, ProfileError, load_profile
from ..cluster.policy.placement.registry import check_placement
from ..cluster.policy.registry import check_router
from ..coldstart.planner import PlannerConfig
from ..config.engine import EngineConfig
from ..config.notations import parse_num_bytes
from ..config.simulate import SimulateConfig
from ..errors import ConfigError
from ..near_names import near_names
from ..scheduler.predictor import make_predictor
from .cluster_spec import DEFAULT_ROUTER, ClusterSpec, ServerLife
from .engine import SimulationOptions
from .machines import SimulatedMachine
from .registry import named_machines, recipes

_LOG = logging.getLogger(__name__)

_GIB = 2**30
_OF_BASELINE = {"cached": "pipelined", "serial": "blocking"}  # strategies
_FILE_BYTES_PER_S = 1e9  # by hand: reading of adapters' files, which no profile measures


def machine_of(
    name: str | None, workload: str, config: EngineConfig, given: frozenset[str]
) -> SimulatedMachine:
    """The named machine, the machine of a profile's file, or this one as last measured.

    Args:
        name: A name in ``named_machines`` or a file; None = the newest profile of this machine, or
            without one the machine that the workload is meant for.
        workload: The value of ``--workload``.
        config: Its sizes apply where they are ``given``, otherwise the machine's own.
        given: Names of options that were given.

    Raises:
        ConfigError: There is no such machine, and no profile.
    """
    path = _newest() if name is None else Path(name)
    if path is None:
        name = _meant_for(workload)
    machines = named_machines()
    if name is not None and name in machines:
        machine = machines[name]
    elif name is not None and not Path(name).is_file():
        near = near_names(name, machines, " (do you mean {}?)")
        raise ConfigError(
            f"--profile is {name!r}, which is no file and no machine{near}; machines: {', '.join(machines)}"
        )
    else:
        assert path is not None
        machine = _measured(path, config)
    sizes: dict[str, Any] = {
        option: getattr(config, option)
        for option in ("block_size", "max_num_batched_tokens", "max_num_seqs")
        if option in given
    }
    if config.memory_gib is not None:
        sizes["memory_bytes"] = int(config.memory_gib * _GIB)
    if config.link_gib_per_s is not None:
        latency_s = config.link_latency_us / 1e6
        link = LinkModel(config.link_gib_per_s * _GIB, latency_s)
        sizes["model"] = replace(machine.model, link=link)
    return replace(machine, **sizes)


def options_of(config: EngineConfig) -> SimulationOptions:
    """Options of a simulated engine with this configuration."""
    return SimulationOptions(
        scheduling_policy=config.scheduling_policy,
        make_predictor=lambda _: make_predictor(config.output_predictor),
        slo_ttft_s=config.slo_ttft_s,
        growth_headroom=config.growth_headroom,
        max_decode_gap_s=config.max_decode_gap_s,
        memory_policy=config.memory_policy,
        prefix_cache=config.prefix_cache == "on",
        adapter_memory_fraction=config.adapter_memory_fraction,
        host_bytes=_num_bytes(config.host_bytes, "--host-bytes"),
        cold_starts=PlannerConfig.of_options(
            _OF_BASELINE.get(config.load_strategy, config.load_strategy),
            config.cold_priority,
            config.max_assisted_stall,
        ),
        baseline=config.load_strategy if config.load_strategy in _OF_BASELINE else None,
    )


def cluster_of(config: SimulateConfig, given: frozenset[str]) -> ClusterSpec | None:
    """The servers and their routers; None = one server without a router.

    Raises ``ConfigError`` if there is no such router or placement, or if an option that is
    ``given`` would have no effect.
    """
    if config.placement is None and "placement_every_s" in given:
        raise ConfigError("--placement-every-s is given, but no --placement")
    if config.placement is None and config.store_bytes is None and "peer_gib_per_s" in given:
        raise ConfigError(
            "--peer-gib-per-s is given, but each server has all files: give --store-bytes or --placement, too"
        )
    is_routed = config.router is not None or config.routers > 1 or config.state_age_s > 0.0
    if config.servers == 1 and not is_routed and config.placement is config.store_bytes is None:
        return None
    if config.placement is not None:
        check_placement(config.placement)
    router = config.router or DEFAULT_ROUTER
    check_router(router)
    return ClusterSpec(
        servers=(ServerLife(),) * config.servers,
        router=router,
        num_routers=config.routers,
        placement=config.placement,
        placement_every_s=config.placement_every_s,
        state_age_s=config.state_age_s,
        store_bytes=_num_bytes(config.store_bytes, "--store-bytes"),
        peer_bytes_per_s=config.peer_gib_per_s * _GIB,
    )


def _num_bytes(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_num_bytes(text, flag)


def _measured(path: Path, config: EngineConfig) -> SimulatedMachine:
    try:
        profile = load_profile(path)
    except ProfileError as error:
        raise ConfigError(str(error)) from error
    shape = profile.subject.shape
    device_type = "cpu" if profile.subject.machine.device == "cpu" else "cuda"
    return SimulatedMachine(
        name=_title(profile),
        model=profile.model,
        memory_bytes=int(profile.free_bytes * config.memory_share(device_type)),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        adapter_bytes_per_rank=profile.budgets[0].adapter_bytes // profile.budgets[0].rank,
        group_targets=tuple(deltas.rank_sum // profile.reference_rank for deltas in profile.deltas),
        file_bytes_per_s=_FILE_BYTES_PER_S,
        block_size=config.block_size,
        max_num_batched_tokens=config.step_tokens(device_type),
        max_num_seqs=config.max_num_seqs,
        separate_assisted_rows=device_type == "cuda",
        has_pages=device_type == "cuda",
        max_rank=max(budget.rank for budget in profile.budgets),
    )


def _title(profile: Profile) -> str:
    machine = profile.subject.machine
    return f"{machine.device} ({machine.cpu_model}), measured {profile.created_at[:10]}"


def _newest() -> Path | None:
    """The newest of this user's profiles."""
    return max(_directory().glob("*.json"), key=lambda path: path.stat().st_mtime, default=None)


@cache  # warns once
def _meant_for(workload: str) -> str:
    """The machine of a recipe. Raises ``ConfigError`` for another workload, which has none."""
    recipe = recipes().get(workload)
    if recipe is None:
        raise ConfigError(
            f"there is no profile of this machine in {_directory()}; run corun profile, or name a "
            f"machine by --profile: {', '.join(named_machines())}"
        )
    _LOG.info(
        "there is no profile of this machine, so %s is simulated, which %s is meant for "
        "(--profile names another)",
        recipe.machine,
        workload,
    )
    return recipe.machine


def _directory() -> Path:
    return state_directory(dict(os.environ), Path.home())
