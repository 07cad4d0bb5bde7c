"""Saved profiles: writing and reading, and reasons for refusal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from corun.profiles.profile import ProfileError, Quality, check_fits, differences, load_profile, save_profile
from support.profiles import PROFILE, SUBJECT, with_r_squared


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "made" / "with it" / "profile.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_a_profile_without_the_form_of_kernels_is_of_exact_ones(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    fields = json.loads(path.read_text())
    assert fields["model"]["lora"].pop("is_padded") is False
    path.write_text(json.dumps(fields))
    assert load_profile(path) == PROFILE


@pytest.mark.parametrize("text", ["", "{", '{"machine": 3}', "[]", '{"format_version": 6}'])
def test_what_is_no_profile_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"broken\.json holds no profile"):
        load_profile(path)


def test_a_missing_file_and_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no profile"):
        load_profile(tmp_path / "missing.json")
    path = tmp_path / "old.json"
    path.write_text('{"format_version": 1, "fields": "of long ago"}')
    with pytest.raises(ProfileError, match=r"old\.json has format 1.*run corun profile again"):
        load_profile(path)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(PROFILE, tmp_path / "file" / "profile.json")


def test_differences_say_what_has_changed() -> None:
    assert differences(SUBJECT.machine, SUBJECT.machine) == ()
    machine = replace(SUBJECT.machine, cpu_model="Another CPU", num_cpus=4)
    assert differences(SUBJECT.machine, machine) == (
        "cpu model: A CPU then, Another CPU now",
        "num cpus: 2 then, 4 now",
    )
    shape = replace(SUBJECT.shape, groups=())
    assert differences(SUBJECT.shape, shape) == ("groups: q_proj, 64, 128 then, none now",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step_fit", "whole steps"),
        ("decode_fit", "adapters in decode"),
        ("prefill_fit", "adapters in prefill"),
    ],
)
def test_one_that_predicts_nothing_is_not_read(tmp_path: Path, name: str, words: str) -> None:
    path = tmp_path / "guess.json"
    for r_squared, error, shown in ((0.49, None, ""), (-12.0, 0.26, " with errors of 26%")):
        save_profile(with_r_squared(name, r_squared, error), path)
        text = rf"guess\.json is not used: .*that of {words} explains {r_squared:.2f}{shown};"
        with pytest.raises(ProfileError, match=text):
            load_profile(path)
    poor, flat = with_r_squared(name, 0.5), with_r_squared(name, -0.2, 0.25)
    for usable in (poor, flat):
        save_profile(usable, path)
        assert load_profile(path) == usable


def test_why_nothing_can_be_predicted_is_said() -> None:
    check_fits(PROFILE)
    busy = Quality(("other programs used 1.5 CPUs",), ())
    with pytest.raises(ProfileError, match=r"the machine was busy: other programs used 1\.5 CPUs"):
        check_fits(replace(with_r_squared("step_fit", 0.0), quality=busy))
