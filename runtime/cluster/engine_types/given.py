"""Engines of ``--engine``: those of another type come with the facts that they do not report."""

from ...config.cluster import GivenEngine, parse_engine
from ...config.engine import EngineConfig
from ...errors import ConfigError, ModelError
from ..wire import EngineCard, ForeignEngine


def given_card(text: str) -> EngineCard:
    """Return the engine of an ``--engine`` option.

    Raises ``ConfigError`` for an option that is wrong, or a model that cannot be read.
    """
    given = parse_engine(text)
    foreign = None if given.model is None else _read(given, given.model)
    return EngineCard(engine_id=given.url, url=given.url, foreign=foreign)


def _read(given: GivenEngine, model: str) -> ForeignEngine:
    from ...engine.assembly.base_model import read_base_model  # loads torch

    try:
        base = read_base_model(EngineConfig(model=model))
    except ModelError as error:
        raise ConfigError(f"--engine {given.url}: {error}") from error
    return ForeignEngine(
        kind=given.kind,
        base_fingerprint=base.fingerprint,
        dtype=base.dtype,
        adapter_bytes_per_rank=base.adapter_bytes_per_rank,
        kv_bytes_per_token=base.kv_bytes_per_token,
        max_num_batched_tokens=given.max_num_batched_tokens,
        max_num_seqs=given.max_num_seqs,
    )
