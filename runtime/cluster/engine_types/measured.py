"""Engines of ``--engine``; those of another type come with a measured profile."""

from pathlib import Path

from ....profiles.profile import ProfileError, load_profile
from ...config.cluster import GivenEngine, parse_engine
from ...errors import ConfigError
from ..wire import EngineCard, MeasuredEngine


def given_card(text: str) -> EngineCard:
    """Return the engine of an ``--engine`` option, with its profile if one is given.

    Raises ``ConfigError`` if the file is no profile of such a server.
    """
    given = parse_engine(text)
    measured = None if given.profile is None else _read(given, Path(given.profile).expanduser())
    return EngineCard(engine_id=given.url, url=given.url, measured=measured)


def _read(given: GivenEngine, path: Path) -> MeasuredEngine:
    try:
        profile = load_profile(path)
    except ProfileError as error:
        raise ConfigError(f"--engine {given.url}: {error}") from error
    if profile.server is None or profile.server.kind != given.kind:
        machine = profile.subject.machine
        raise ConfigError(
            f"--engine {given.url}: {path} is a profile of {machine.device} ({machine.cpu_model}), "
            f"and of no {given.kind} server; corun profile --url {given.url} measures it"
        )
    budget = profile.budgets[-1]
    return MeasuredEngine(
        server=profile.server,
        dtype=profile.subject.shape.dtype,
        adapter_bytes_per_rank=budget.adapter_bytes // budget.rank,
        kv_bytes_per_token=profile.subject.shape.kv_bytes_per_token,
        machine=profile.model,
    )
