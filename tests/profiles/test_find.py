"""The choice of a profile: one that fits, and warnings about one that does not."""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from corun.profiles.find import Fitness, default_path, find_or_measure, judge, state_directory
from corun.profiles.profile import Profile, ProfileError, Quality, Subject, load_profile, save_profile
from support.profiles import PROFILE, SUBJECT

NOW = datetime(2026, 11, 22, tzinfo=UTC)

Find = Callable[..., Profile]


def _never() -> Profile:
    raise AssertionError("there is a profile, so none is measured")


@pytest.fixture
def find(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Find:
    caplog.set_level(logging.INFO)

    def find(
        subject: Subject = SUBJECT,
        given: Path | None = None,
        measure: Callable[[], Profile] = _never,
        now: datetime = NOW,
    ) -> Profile:
        return find_or_measure(subject, given, tmp_path, measure, now)

    return find


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_fits_fits() -> None:
    assert judge(PROFILE, SUBJECT, NOW) == Fitness()


def test_another_machine_other_options_and_another_model_are_told_apart() -> None:
    machine = replace(SUBJECT.machine, cpu_model="Another CPU")
    settings = replace(SUBJECT.settings, link="unpaced")
    found = judge(PROFILE, replace(SUBJECT, machine=machine, settings=settings), NOW)
    assert found.foreign == (
        "cpu model: A CPU then, Another CPU now",
        "link: 1 GiB/s + 0 us then, unpaced now",
    )
    assert not found.refusals and not found.stale
    shape = replace(SUBJECT.shape, num_layers=3)
    assert judge(PROFILE, replace(SUBJECT, shape=shape), NOW) == Fitness(
        refusals=("num layers: 2 then, 3 now",)
    )


def test_versions_and_age_make_it_stale() -> None:
    subject = replace(SUBJECT, torch_version="2.14.0", corun_version="0.2.0")
    found = judge(PROFILE, subject, NOW + timedelta(days=100))
    assert found == Fitness(
        stale=("torch: 2.13.0 then, 2.14.0 now", "corun: 0.1.0 then, 0.2.0 now", "it is 100 days old")
    )


def test_the_default_place_follows_the_xdg_specification() -> None:
    home = Path("/home/somebody")
    assert state_directory({}, home) == home / ".local/state/corun/profiles"
    assert state_directory({"XDG_STATE_HOME": "/state"}, home) == Path("/state/corun/profiles")
    relative = state_directory({"XDG_STATE_HOME": "state"}, home)
    assert relative == home / ".local/state/corun/profiles"


def test_the_file_is_named_by_all_but_the_versions(tmp_path: Path) -> None:
    path = default_path(SUBJECT, tmp_path)
    assert path == default_path(replace(SUBJECT, torch_version="2.14.0"), tmp_path)
    for changed in (
        replace(SUBJECT, machine=replace(SUBJECT.machine, num_cpus=4)),
        replace(SUBJECT, settings=replace(SUBJECT.settings, has_workers=False)),
        replace(SUBJECT, shape=replace(SUBJECT.shape, dtype="float16")),
    ):
        assert default_path(changed, tmp_path) != path


def test_without_one_a_quick_one_is_measured_once(
    find: Find, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find(measure=lambda: PROFILE) == PROFILE
    assert "measuring a profile, because there is none" in caplog.text
    assert load_profile(default_path(SUBJECT, tmp_path)) == PROFILE
    assert find() == PROFILE
    assert not _warnings(caplog)


def test_a_broken_one_in_the_default_place_is_replaced(
    find: Find, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    default_path(SUBJECT, tmp_path).write_text("{")
    assert find(measure=lambda: PROFILE) == PROFILE
    assert "holds no profile" in caplog.text
    assert find() == PROFILE


def test_a_place_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found = find_or_measure(SUBJECT, None, tmp_path / "file", lambda: PROFILE, NOW)
    assert found == PROFILE
    (warning,) = _warnings(caplog)
    assert "not kept for the next start" in warning


def test_a_named_one_of_another_machine_is_used_with_a_warning(
    find: Find, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "theirs.json"
    save_profile(PROFILE, path)
    subject = replace(SUBJECT, machine=replace(SUBJECT.machine, cpu_model="Another CPU"))
    assert find(subject, path) == PROFILE
    (warning,) = _warnings(caplog)
    assert "theirs.json is another machine's" in warning
    assert "Another CPU now" in warning


def test_a_stale_one_is_used_with_a_warning(
    find: Find, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_profile(PROFILE, default_path(SUBJECT, tmp_path))
    assert find(replace(SUBJECT, torch_version="2.14.0")) == PROFILE
    (warning,) = _warnings(caplog)
    assert "is stale; run corun profile again: torch: 2.13.0 then, 2.14.0 now" in warning


def test_one_of_a_busy_machine_is_used_with_a_warning(
    find: Find, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy = replace(PROFILE, quality=Quality(("other programs used 1.5 CPUs",), ()))
    save_profile(busy, default_path(SUBJECT, tmp_path))
    assert find() == busy
    (warning,) = _warnings(caplog)
    assert "the machine was busy" in warning


def test_a_named_one_must_be_there_and_of_this_model(find: Find, tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    with pytest.raises(ProfileError, match=r"named\.json holds no profile"):
        find(given=path)
    save_profile(PROFILE, path)
    other = replace(SUBJECT, shape=replace(SUBJECT.shape, num_layers=3))
    with pytest.raises(ProfileError, match=r"another model: num layers: 2 then, 3 now"):
        find(other, path)
