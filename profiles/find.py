"""Finds the profile that fits, or measures one. Pure but for files."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from .profile import Profile, ProfileError, Subject, differences, load_profile, save_profile
from .report import warning_lines

_LOG = logging.getLogger(__name__)

MAX_AGE = timedelta(days=90)


@dataclass(frozen=True, slots=True)
class Fitness:
    """Reasons against a profile for a subject. All empty: it fits."""

    refusals: tuple[str, ...] = ()  # of another model: the figures do not apply
    foreign: tuple[str, ...] = ()  # of another machine, or measured with other options
    stale: tuple[str, ...] = ()  # outdated


def judge(profile: Profile, subject: Subject, now: datetime) -> Fitness:
    """Compare the conditions of ``profile`` with the current ones."""
    then = profile.subject
    foreign = (*differences(then.machine, subject.machine), *differences(then.settings, subject.settings))
    stale = [
        f"{name}: {a} then, {b} now"
        for name, a, b in (
            ("torch", then.torch_version, subject.torch_version),
            ("corun", then.corun_version, subject.corun_version),
        )
        if a != b
    ]
    age = now - datetime.fromisoformat(profile.created_at)
    if age > MAX_AGE:
        stale.append(f"it is {age.days} days old")
    return Fitness(differences(then.shape, subject.shape), foreign, tuple(stale))


def state_directory(environment: dict[str, str], home: Path) -> Path:
    """The directory of this user's profiles. Source: XDG base directory specification."""
    state = environment.get("XDG_STATE_HOME", "")
    # The specification ignores relative paths.
    base = Path(state) if state.startswith("/") else home / ".local" / "state"
    return base / "corun" / "profiles"


def default_path(subject: Subject, directory: Path) -> Path:
    """The file of this machine, these options and this model's shape, for all versions."""
    key = msgspec.json.encode((subject.machine, subject.settings, subject.shape))
    return directory / f"{hashlib.sha256(key).hexdigest()[:16]}.json"


def find_or_measure(
    subject: Subject, given: Path | None, directory: Path, measure: Callable[[], Profile], now: datetime
) -> Profile:
    """The profile in ``given`` or at the default path; without one, measure it and save it there.

    Args:
        subject: The machine, options and model to predict.
        given: ``--profile``, which must exist; None = the default path.
        directory: Of the default path.
        measure: Measures a profile.
        now: With its time zone.

    Raises:
        ProfileError: ``given`` holds no profile, or one of another model.
    """
    profile = find_saved(subject, given, directory, now)
    return _measured(default_path(subject, directory), measure) if profile is None else profile


def find_saved(subject: Subject, given: Path | None, directory: Path, now: datetime) -> Profile | None:
    """The profile in ``given`` or at the default path, if there is one that can be read.

    See ``find_or_measure``.
    """
    path = given or default_path(subject, directory)
    try:
        profile = load_profile(path)
    except ProfileError as error:
        if given is not None:
            raise
        if path.exists():
            _LOG.warning("%s", error)
        return None
    fitness = judge(profile, subject, now)
    if fitness.refusals:
        raise ProfileError(f"{path} is of another model: {'; '.join(fitness.refusals)}")
    if fitness.foreign:
        _LOG.warning(
            "the profile %s is another machine's or was made with other options, so predictions "
            "will be off: %s",
            path,
            "; ".join(fitness.foreign),
        )
    if fitness.stale:
        _LOG.warning("the profile %s is stale; run corun profile again: %s", path, "; ".join(fitness.stale))
    _LOG.info("using the profile %s, measured at %s", path, profile.created_at)
    _warn(profile)
    return profile


def _measured(path: Path, measure: Callable[[], Profile]) -> Profile:
    _LOG.info(
        "measuring a profile, because there is none at %s (corun profile --budget-s 300 makes a better one)",
        path,
    )
    profile = measure()
    _warn(profile)
    try:
        save_profile(profile, path)
    except ProfileError as error:
        _LOG.warning("the profile is not kept for the next start: %s", error)
    else:
        _LOG.info("the profile is kept in %s", path)
    return profile


def _warn(profile: Profile) -> None:
    for line in warning_lines(profile):
        _LOG.warning("the profile: %s", line)
