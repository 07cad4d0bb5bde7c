"""The cores of engine and workers, and the directories of stored weights and verdicts."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ....profiles.find import state_directory
from ....shm.kept_code import VARIABLE as KERNELS_VARIABLE
from ....shm.kept_code import shared_with, why_code_is_not_kept
from ...config.engine import EngineConfig
from ...config.notations import format_cpus, parse_cpu_cores
from ...machine.cores import CorePlan, CoreRequest, background_cpus, plan_cores
from ...machine.devices import read_cuda_devices
from ...machine.facts import MachineFacts

STATE_VARIABLE = "XDG_STATE_HOME"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """The cores of the engine, and those for workers."""

    plan: CorePlan
    machine: MachineFacts  # with the CPUs of the engine's thread
    line: str  # for the start-up summary
    background_cpus: tuple[int, ...] = ()  # of the engine's helper threads; () = the engine's


def kept_directory() -> Path | None:
    """Return the directory of packed weights and of results of earlier starts.

    None if it cannot be made, or if other users can write to it: then nothing is stored.
    """
    state = _state()
    return None if _why_state_is_not_kept(state) is not None else state


def verdicts_directory() -> Path | None:
    """Return the directory of results of trying models; None if nothing is stored."""
    kept = kept_directory()
    return None if kept is None else kept / "verdicts"


def warn_of_what_is_not_kept() -> None:
    """Log once what each start has to repeat, and the variables that change this."""
    reasons = {
        KERNELS_VARIABLE: ("compiles kernels again", why_code_is_not_kept()),
        STATE_VARIABLE: ("tests models again", _why_state_is_not_kept(_state())),
    }
    found = {name: told for name, told in reasons.items() if told[1] is not None}
    if found:
        _LOG.warning(
            "every start %s, because %s; set %s to a directory that only this user can write to",
            " and ".join(what for what, _ in found.values()),
            ", and ".join(str(why) for _, why in found.values()),
            " and ".join(found),
        )


def _state() -> Path:
    return state_directory(dict(os.environ), Path.home()).parent


def _why_state_is_not_kept(state: Path) -> str | None:
    shared = shared_with(state)
    if shared is not None:
        return f"other users can write to {shared}"
    if state.exists():  # possibly on a read-only file system, prepared by another user
        return None
    try:
        state.mkdir(parents=True)
    except OSError as error:
        return f"{state} cannot be made: {error.strerror}"
    return None


def place_engine(config: EngineConfig, machine: MachineFacts) -> Placement:
    """Plan the cores, log problems, and pin the calling thread, which is the engine's.

    Threads that it starts later inherit its cores, unless they pin themselves. A sandbox that
    forbids pinning is not an error.
    Raises ``ConfigError`` for cores that do not exist or are not allowed.
    """
    from ....cpu_workers.affinity import pin_thread
    from ....gpu.model.load import resolve_device

    device = resolve_device(config.device)
    node = None
    if device.type == "cuda":
        # PyTorch numbers devices as the driver does, with CUDA_VISIBLE_DEVICES applied.
        node = next((one.numa_node for one in read_cuda_devices()[device.index or 0 :]), None)
    off_reason = None
    if device.type == "cpu" and config.link_gib_per_s is None:
        off_reason = "the model runs on the CPU itself"
    plan = plan_cores(machine, _request(config, off_reason), node)
    for warning in plan.warnings:
        _LOG.warning("%s", warning)
    reasons = plan.reasons
    background = background_cpus(machine, plan)
    if plan.engine_cpus:
        pinning = pin_thread(plan.engine_cpus)
        machine = replace(machine, allowed_cpus=pinning.granted)
        if not pinning.is_exact:
            _LOG.warning("cannot pin the engine as planned: %s", pinning.describe())
            reasons = (*reasons, f"but the engine runs on {format_cpus(pinning.granted)}")
    return Placement(plan, machine, "; ".join(reasons), background)


def _request(config: EngineConfig, off_reason: str | None) -> CoreRequest:
    engine = config.engine_cores
    return CoreRequest(
        worker_cpus=_worker_cpus(config.cpu_cores),
        engine_cpus=None if engine is None else parse_cpu_cores(engine, "--engine-cores"),
        off_reason=off_reason,
    )


def _worker_cpus(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    return () if text == "none" else parse_cpu_cores(text, "--cpu-cores")
