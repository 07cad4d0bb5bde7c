"""Measures profiles of a loaded model, and finds the profile for an engine's predictions.

Like ``build`` it knows all parts: device, model, workers, options. Importing this module loads no
torch, calling it does.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from .... import __version__
from ....profiles.busy import busy_reasons
from ....profiles.find import default_path, find_or_measure, find_saved, state_directory
from ....profiles.meter import OnReport, Report
from ....profiles.profile import Machine, Profile, ProfileError, Settings, Subject, check_fits
from ...config.demo import with_demo
from ...config.engine import EngineConfig
from ...errors import ConfigError, CorunError, ModelError, ResourceError
from ...machine.facts import MachineFacts, read_machine_facts
from .placement import Placement, kept_directory, place_engine
from .sizes import step_bytes
from .turns import measure_turns

if TYPE_CHECKING:
    from ....gpu.execution.assemble import LoadedModel

_LOG = logging.getLogger(__name__)

_OFF = "co-execution off: "  # prefix of the last reason of a plan without workers
_MIN_TOKENS = 16  # of the largest step, as curves need several sizes
_LOOK_S = 0.3  # check of the machine before measuring


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """A measured profile, and its subject."""

    profile: Profile
    placement: Placement
    default_path: Path  # where engines with these options look for it


@dataclass(frozen=True, slots=True)
class ProfileListener:
    """Callbacks of a run."""

    on_progress: Callable[[str], None]  # steps before measuring
    on_estimate: Callable[[float], None]  # estimated seconds of measuring
    on_report: OnReport


def run_profile(config: EngineConfig, budget_s: float | None, listener: ProfileListener) -> ProfileRun:
    """Load the model as an engine process would, and measure it.

    Args:
        config: The options; without a model, the demo.
        budget_s: About how long to measure; None = half a minute at most.
        listener: Called with progress.

    Raises:
        CorunError: The model cannot be loaded, a part cannot be measured, or the measured
            profile cannot predict.
    """
    config = with_demo(config)
    assert config.model is not None
    from ....gpu.execution import assemble, start_probe
    from ....gpu.execution.threads import set_threads
    from ....gpu.model.source import ModelSource

    facts = read_machine_facts()
    placement = place_engine(config, facts)
    most_threads = placement.machine.num_threads
    set_threads(config.cpu_threads or most_threads)
    source = ModelSource(config.model, config.revision, config.trust_remote_code)
    loaded = assemble.load(source, config, listener.on_progress, placement.background_cpus, kept_directory())
    try:
        if not loaded.target_map.inside:
            raise ModelError(
                f"adapters cannot target any module of {config.model}: there is nothing to measure"
            )
        listener.on_progress("comparing logits with transformers (parity probe)")
        loaded = start_probe.probe(
            loaded,
            config,
            kept=kept_directory(),
            max_threads=most_threads if config.cpu_threads is None else None,
        )
        subject = subject_of(config, loaded, placement, facts)
        with _as_corun_error():
            profile = _measure(config, loaded, placement, subject, budget_s, listener)
        if loaded.weights.late is not None:
            listener.on_progress("writing quantised weights for the next start")
            loaded.weights.late.write()
    finally:
        loaded.close()
    return ProfileRun(profile, placement, default_path(subject, _directory()))


def profile_for(
    config: EngineConfig,
    loaded: "LoadedModel",
    placement: Placement,
    facts: MachineFacts,
    on_progress: Callable[[str], None],
) -> Profile | None:
    """Return the profile for an engine with CPU workers; measured if there is none.

    None, with a warning, if that fails for any reason: an engine can serve without predictions.
    Call it before the KV pool is made, in the thread that will run the model.

    Args:
        config: The options; ``profile`` names a file.
        loaded: The model, probed, so that its threads are chosen.
        placement: Where engine and workers run.
        facts: Of the machine, read before the engine was pinned.
        on_progress: Called before measuring.

    Raises:
        ConfigError: ``--profile`` is not a profile, or belongs to another model.
    """

    def find(given: Path | None) -> Profile:
        subject = subject_of(config, loaded, placement, facts)

        def measure() -> Profile:
            on_progress("measuring this machine with the model")
            said = ""

            def report(report: Report) -> None:
                nonlocal said
                if report.what != said:
                    said = report.what
                    on_progress(f"measuring {said}; about {report.left_s:.0f} s left")

            listener = ProfileListener(on_progress, _log_estimate, report)
            return _measure(config, loaded, placement, subject, None, listener)

        return find_or_measure(subject, given, _directory(), measure, datetime.now(UTC))

    if config.profile is not None:
        with _as_corun_error(ConfigError):
            return find(Path(config.profile))
    try:
        return find(None)
    except Exception as error:
        is_told = isinstance(error, ProfileError)
        _LOG.warning(
            "could not measure this machine: %s; co-execution is off, and requests wait until "
            "their adapter is on the device; run corun profile with the same options (the next "
            "start uses the profile that it writes), or give a profile with --profile",
            error if is_told else f"{type(error).__name__}: {error}",
            exc_info=not is_told,
        )
        return None


def saved_profile(
    config: EngineConfig, loaded: "LoadedModel", placement: Placement, facts: MachineFacts
) -> Profile | None:
    """Return the stored profile of this machine and model, or None. Measures nothing.

    For engines without co-execution, which can serve without. Otherwise as ``profile_for``.
    """
    given = None if config.profile is None else Path(config.profile)
    subject = subject_of(config, loaded, placement, facts)
    with _as_corun_error(ConfigError):
        return find_saved(subject, given, _directory(), datetime.now(UTC))


def subject_of(
    config: EngineConfig, loaded: "LoadedModel", placement: Placement, facts: MachineFacts
) -> Subject:
    """Return the subject of a profile with these options."""
    import torch

    from ....gpu.forward.kernel_threads import num_kernel_threads
    from ....profiles.measure.shape import model_shape

    device = loaded.model.device
    is_cuda = device.type == "cuda"
    return Subject(
        machine=Machine(
            cpu_model=facts.cpu_model,
            num_cpus=facts.num_cpus,
            device=torch.cuda.get_device_name(device) if is_cuda else device.type,
        ),
        settings=Settings(
            num_threads=0 if is_cuda else num_kernel_threads(),
            has_workers=bool(placement.plan.worker_cpus),
            worker_slowdown=config.worker_slowdown,
            delta_backend=config.delta_backend,
            link=loaded.device.choices.link,
            backends=tuple(loaded.backend_names.values()),
        ),
        shape=model_shape(loaded),
        torch_version=str(torch.__version__),
        corun_version=__version__,
    )


def _measure(
    config: EngineConfig,
    loaded: "LoadedModel",
    placement: Placement,
    subject: Subject,
    budget_s: float | None,
    listener: ProfileListener,
) -> Profile:
    from ....gpu.device.select import DeviceOptions, make_device
    from ....gpu.execution import assemble
    from ....profiles.measure.cpu_use import CpuUseSampler
    from ....profiles.measure.effort import EFFORT
    from ....profiles.measure.profiler import Bench, Listener, measure_profile

    free_bytes = assemble.free_bytes(loaded.model.device, read_machine_facts().memory_available_bytes)
    effort = EFFORT if budget_s is None else EFFORT.within(budget_s)
    plan, max_context = placement.plan, _max_context(config, loaded)
    allowed = os.sched_getaffinity(0)
    cpus = sorted(allowed.union(plan.worker_cpus))
    _look_at_machine(cpus)
    # Its own device, because streams must be made before a device's first operation.
    device = make_device(loaded.model.device, DeviceOptions.of(config))
    try:
        bench = Bench(
            loaded=loaded,
            device=device,
            subject=subject,
            effort=effort,
            max_tokens=max(_MIN_TOKENS, min(loaded.max_step_tokens, max_context)),
            max_context=max(_MIN_TOKENS, max_context),
            worker_cpus=plan.worker_cpus,
            supervisor_cpus=plan.supervisor_cpus,
            delta_cpu=plan.worker_cpus[0] if plan.worker_cpus else max(allowed),
            coexecution_off="" if plan.worker_cpus else plan.reasons[-1].removeprefix(_OFF),
            free_bytes=max(0, free_bytes - step_bytes(config, loaded)),
        )
        profile = measure_profile(
            bench, Listener(listener.on_estimate, listener.on_report), CpuUseSampler(cpus).use
        )
    finally:
        device.close()
    check_fits(profile)
    listener.on_progress("measuring the engine's own time around steps")
    return _with_turns(config, loaded, placement, profile)


def _with_turns(
    config: EngineConfig, loaded: "LoadedModel", placement: Placement, profile: Profile
) -> Profile:
    """Return ``profile`` with the engine's own times around steps."""
    from ....gpu.device.select import DeviceOptions, make_device

    options = DeviceOptions.of(config, placement.background_cpus)
    device = make_device(loaded.model.device, options)
    try:
        times = measure_turns(loaded, device, profile.model, profile.min_group_bytes)
    finally:
        device.close()
    model = replace(
        profile.model,
        turn_s=times.turn_s,
        turn_row_s=times.row_s,
        request_s=times.request_s,
        load_s=times.load_s,
    )
    return replace(profile, model=model)


def _max_context(config: EngineConfig, loaded: "LoadedModel") -> int:
    """Return the longest row that the model computes."""
    limits = (
        config.max_model_len,
        getattr(loaded.config, "max_position_embeddings", None),
        loaded.max_exact_len,
    )
    return min([limit for limit in limits if limit is not None], default=2**20)


def _look_at_machine(cpus: list[int]) -> None:
    """Warn of problems that would distort the measurements."""
    from ....profiles.measure.cpu_use import CpuUseSampler

    sampler = CpuUseSampler(cpus)
    time.sleep(_LOOK_S)
    for reason in busy_reasons(sampler.use(), ()):
        _LOG.warning("the machine is busy, so measurements will be inaccurate: %s", reason)


def _log_estimate(seconds: float) -> None:
    _LOG.info("measuring takes about %.0f s", seconds)


def _directory() -> Path:
    return state_directory(dict(os.environ), Path.home())


@contextmanager
def _as_corun_error(kind: type[CorunError] = ResourceError) -> Iterator[None]:
    """Convert the profiles' own errors to ``kind``."""
    try:
        yield
    except ProfileError as error:
        raise kind(str(error)) from error
