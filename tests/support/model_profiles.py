"""An invented profile for a model and this machine, so that no test has to measure one."""

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from corun.cpu_workers.teams import JobModel
from corun.gpu.execution import assemble
from corun.gpu.execution.threads import set_threads
from corun.gpu.model.source import ModelSource
from corun.profiles.curve import Curve
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.profiles.profile import Subject, save_profile
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.placement import place_engine
from corun.runtime.engine.assembly.profiling import subject_of
from corun.runtime.machine.facts import read_machine_facts
from support.profiles import PROFILE

_STEP_S = Curve((1.0, 512.0), (0.002, 0.02))
_JOB = JobModel(s_per_product=2e-6, call_s=1e-5)  # at a rank sum of 16


@dataclass(frozen=True)
class Figures:
    """Properties of an invented machine."""

    step_s: Curve = _STEP_S
    link_bytes_per_s: float = 1e9
    min_group_bytes: int = 1


def save_made_up_profile(config: EngineConfig, path: Path, figures: Figures | None = None) -> Path:
    """Write a profile that an engine with these options accepts without a warning."""
    figures = figures or Figures()
    subject = _subject(config)
    num_layers, groups = subject.shape.num_layers, subject.shape.groups
    base_s = Curve(figures.step_s.x, tuple(y / num_layers / len(groups) / 2 for y in figures.step_s.y))
    model = MachineModel(
        num_layers=num_layers,
        step_s=figures.step_s,
        groups=tuple(GroupModel(name, base_s, 1 / 16) for name, _, _ in groups),
        invocation_s=2e-5,
        lora=LoraModel(1e-9, 1e-5, 1e-12, 1e-5),
        link=LinkModel(figures.link_bytes_per_s, 1e-5),
        num_workers=int(subject.settings.has_workers),
        job=_JOB,
    )
    save_profile(
        replace(PROFILE, subject=subject, model=model, min_group_bytes=figures.min_group_bytes), path
    )
    return path


def _subject(config: EngineConfig) -> Subject:
    """Load the model as an engine does, in a thread, because that one is pinned."""
    found: list[Subject] = []

    def look() -> None:
        facts = read_machine_facts()
        placement = place_engine(config, facts)
        if placement.plan.engine_cpus:
            set_threads(config.cpu_threads or placement.machine.num_cpus)
        assert config.model is not None
        source = ModelSource(config.model, config.revision, config.trust_remote_code)
        loaded = assemble.load(source, config, lambda _: None)
        try:
            found.append(subject_of(config, loaded, placement, facts))
        finally:
            loaded.close()

    before = torch.get_num_threads(), os.sched_getaffinity(0)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    torch.set_num_threads(before[0])
    assert os.sched_getaffinity(0) == before[1]
    assert found, "the model could not be loaded"
    return found[0]
