"""Saved profiles: there and back, and what makes one useless."""

from dataclasses import replace
from pathlib import Path

import pytest
from corun.profiles.curve import Curve, CurveFamily
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.profiles.profile import (
    Machine,
    ModelShape,
    Profile,
    ProfileError,
    Quality,
    differences,
    load_profile,
    save_profile,
)

_CURVE = Curve((1.0, 2.0), (0.001, 0.002))
PROFILE = Profile(
    machine=Machine("A CPU", 2, "cpu", "2.13.0", "0.1.0"),
    shape=ModelShape(2, "bfloat16", (("q_proj", 64, 128),)),
    created_at="2026-11-21T10:00:00Z",
    is_thorough=False,
    model=MachineModel(
        num_layers=2,
        step_s=_CURVE,
        groups=(GroupModel("q_proj", _CURVE, CurveFamily((8.0,), (_CURVE,))),),
        invocation_s=2e-5,
        lora=LoraModel(1e-9, 1e-5, 1e-12, 1e-5),
        link=LinkModel(1e10, 1e-5),
        num_workers=1,
        tokens_per_worker=64,
    ),
    min_group_bytes=1 << 20,
    quality=Quality(0.99, 0.98, is_machine_busy=False),
    delta_backends=(("q_proj", ((1, "numba"), (128, "torch"))),),
)


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize("text", ["", "{", '{"machine": 3}', "[]"])
def test_what_is_no_profile_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"broken\.json"):
        load_profile(path)


def test_a_missing_file_and_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no profile"):
        load_profile(tmp_path / "missing.json")
    path = tmp_path / "old.json"
    save_profile(replace(PROFILE, format_version=0), path)
    with pytest.raises(ProfileError, match="run corun profile again"):
        load_profile(path)


def test_differences_say_what_has_changed() -> None:
    assert differences(PROFILE, PROFILE.machine, PROFILE.shape) == ()
    machine = replace(PROFILE.machine, cpu_model="Another CPU", torch_version="2.11.0")
    shape = replace(PROFILE.shape, num_layers=4)
    found = differences(PROFILE, machine, shape)
    assert [text.split(":")[0] for text in found] == ["CPU", "torch", "layers"]
    assert "Another CPU now" in found[0]
