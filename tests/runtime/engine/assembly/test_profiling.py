"""The profile of an engine: measured once, found again, refused if it is wrong."""

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from corun.gpu.execution import assemble, start_probe
from corun.gpu.model.source import ModelSource
from corun.profiles.find import default_path
from corun.profiles.measure import effort
from corun.profiles.profile import Profile, load_profile, save_profile
from corun.runtime.config.engine import EngineConfig
from corun.runtime.demo import demo_model_path
from corun.runtime.engine.assembly.placement import Placement
from corun.runtime.engine.assembly.profiling import profile_for, saved_profile, subject_of
from corun.runtime.errors import ConfigError
from corun.runtime.machine.cores import CorePlan
from corun.runtime.machine.facts import read_machine_facts
from support.profiles import PROFILE, with_r_squared

CONFIG = EngineConfig(model=str(demo_model_path()), device="cpu", link_gib_per_s=1.0, delta_backend="numba")
FACTS = read_machine_facts()
PLACEMENT = Placement(
    CorePlan(
        engine_cpus=(), supervisor_cpus=(), worker_cpus=(), warnings=(), reasons=("co-execution off: a test",)
    ),
    FACTS,
    "",
)


@pytest.fixture(scope="module")
def loaded() -> Iterator[assemble.LoadedModel]:
    made = assemble.load(ModelSource(str(demo_model_path())), CONFIG, lambda _: None)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _short_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(effort, "EFFORT", effort.EFFORT.within(0.5))
    # Undone with what a test sets it to, in the right order: ``any_fit`` would not be.
    monkeypatch.setattr("corun.profiles.profile.MIN_USABLE_R_SQUARED", -math.inf)


def profile_of(
    config: EngineConfig, loaded: assemble.LoadedModel, steps: list[str] | None = None
) -> Profile | None:
    return profile_for(config, loaded, PLACEMENT, FACTS, ([] if steps is None else steps).append)


def test_it_is_measured_once_and_found_again(
    loaded: assemble.LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    steps: list[str] = []
    first = profile_of(CONFIG, loaded, steps)
    assert first is not None
    assert [step.partition(";")[0] for step in steps] == [
        "measuring this machine with the model",
        "measuring base model, prefill",
        "measuring whole steps",
        "measuring link to the device",
        f"measuring deltas on CPU {max(os.sched_getaffinity(0))}",
        "measuring invocations of CPU workers",
        "measuring adapters on the device, decode",
        "measuring adapters on the device, prefill",
        "measuring the engine's own time around steps",
    ]
    assert "measuring a profile, because there is none" in caplog.text
    assert "measuring takes about" in caplog.text
    assert first.model.num_workers == 0
    assert first.coexecution_off == "a test"
    # No copy is faster than its pace, even on a busy machine; the slope of a line through a few
    # of them can be.
    assert first.link_points and max(p.bytes_per_s for p in first.link_points) < 1.05 * 2**30
    assert len(first.model.groups) == 4
    (path,) = (tmp_path / "state/corun/profiles").iterdir()
    subject = subject_of(CONFIG, loaded, PLACEMENT, FACTS)
    assert path == default_path(subject, path.parent)
    assert load_profile(path) == first

    # Parts that are not measured again stay as in the file.
    marked = replace(first, measured_s=12345.0)
    save_profile(marked, path)
    assert profile_of(CONFIG, loaded) == marked
    # The adapters' places are free again, and the model can be used by later tests.
    assert loaded.lora_table.num_free_rows == loaded.lora_table.capacity
    start_probe.probe(loaded, CONFIG, max_threads=None)

    named = tmp_path / "theirs.json"
    machine = replace(first.subject.machine, cpu_model="Another CPU")
    save_profile(replace(first, subject=replace(subject, machine=machine)), named)
    caplog.clear()
    profile_of(replace(CONFIG, profile=str(named)), loaded)
    assert "theirs.json is another machine's" in caplog.text

    shape = replace(first.subject.shape, num_layers=77)
    save_profile(replace(first, subject=replace(subject, shape=shape)), named)
    with pytest.raises(ConfigError, match="another model: num layers: 77 then, 5 now"):
        profile_of(replace(CONFIG, profile=str(named)), loaded)


def test_other_options_have_a_profile_of_their_own(loaded: assemble.LoadedModel) -> None:
    directory = Path("profiles")
    paths = {
        default_path(subject_of(config, loaded, placement, FACTS), directory)
        for config in (CONFIG, replace(CONFIG, worker_slowdown=3.0))
        for placement in (PLACEMENT, replace(PLACEMENT, plan=replace(PLACEMENT.plan, worker_cpus=(1,))))
    }
    assert len(paths) == 4


def test_a_named_profile_must_be_there(loaded: assemble.LoadedModel, tmp_path: Path) -> None:
    config = replace(CONFIG, profile=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"none\.json holds no profile"):
        profile_of(config, loaded)


def test_without_a_link_there_is_what_was_saved(loaded: assemble.LoadedModel, tmp_path: Path) -> None:
    assert saved_profile(CONFIG, loaded, PLACEMENT, FACTS) is None
    subject = subject_of(CONFIG, loaded, PLACEMENT, FACTS)
    profile = replace(PROFILE, subject=subject)
    save_profile(profile, default_path(subject, tmp_path / "state/corun/profiles"))
    assert saved_profile(CONFIG, loaded, PLACEMENT, FACTS) == profile

    named = tmp_path / "theirs.json"
    config = replace(CONFIG, profile=str(named))
    with pytest.raises(ConfigError, match="holds no profile"):
        saved_profile(config, loaded, PLACEMENT, FACTS)
    shape = replace(subject.shape, num_layers=77)
    save_profile(replace(profile, subject=replace(subject, shape=shape)), named)
    with pytest.raises(ConfigError, match="another model"):
        saved_profile(config, loaded, PLACEMENT, FACTS)


@pytest.mark.parametrize(
    "failing", ["profiles.measure.profiler.measure_profile", "gpu.device.select.make_device"]
)
def test_a_start_does_not_depend_on_measuring(
    loaded: assemble.LoadedModel,
    failing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no such kernel image")

    monkeypatch.setattr(f"corun.{failing}", fail)
    assert profile_of(CONFIG, loaded) is None
    (warning,) = [r.getMessage() for r in caplog.records if "co-execution is off" in r.getMessage()]
    for part in ("RuntimeError: no such kernel image", "corun profile", "--profile"):
        assert part in warning
    assert not (tmp_path / "state").exists()


def test_a_start_does_not_use_what_predicts_nothing(
    loaded: assemble.LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("corun.profiles.profile.MIN_USABLE_R_SQUARED", 0.5)
    subject = subject_of(CONFIG, loaded, PLACEMENT, FACTS)
    path = default_path(subject, tmp_path / "state/corun/profiles")
    useless = replace(with_r_squared("decode_fit", 0.4), subject=subject)
    save_profile(useless, path)
    assert saved_profile(CONFIG, loaded, PLACEMENT, FACTS) is None
    named = replace(CONFIG, profile=str(path))
    for find in (profile_of, partial(saved_profile, placement=PLACEMENT, facts=FACTS)):
        with pytest.raises(ConfigError, match="is not used: the profile cannot predict step times"):
            find(named, loaded)

    # Another profile is measured, which is as useless.
    path.unlink()
    monkeypatch.setattr("corun.profiles.measure.profiler.measure_profile", lambda *_: useless)
    caplog.clear()
    assert profile_of(CONFIG, loaded) is None
    (warning,) = [r for r in caplog.records if "co-execution is off" in r.getMessage()]
    assert "adapters in decode explains 0.40" in warning.getMessage() and not warning.exc_info
    assert not path.exists()


def test_a_kept_profile_of_another_model_does_not_stop_a_start(
    loaded: assemble.LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject = subject_of(CONFIG, loaded, PLACEMENT, FACTS)
    save_profile(PROFILE, default_path(subject, tmp_path / "state/corun/profiles"))
    assert profile_of(CONFIG, loaded) is None
    assert "is of another model" in caplog.text
