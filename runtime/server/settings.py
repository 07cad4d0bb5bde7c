"""What the HTTP application is told. Imported before anything of HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ... import __version__
from ..config.engine import EngineConfig
from ..config.serve import ServeConfig

ALLOW_VARIABLE = "CORUN_ALLOW_RUNTIME_LORA_UPDATING"
# How long an answer about the engine waits for it. A step may take longer; what was told before it
# is good enough then.
STATS_TIMEOUT_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Configuration of the HTTP application; the engine's facts come from the engine."""

    served_names: Sequence[str] = ()  # of the base model; empty = the name that it has itself
    api_key: str | None = None
    metrics_prefix: str = "corun"  # gives corun:num_requests_running
    max_body_bytes: int = 32 << 20
    allow_lora_updates: bool = False
    block_size: int = 16  # tokens
    max_num_seqs: int = 256
    version: str = "unknown"

    @classmethod
    def of(
        cls, engine_config: EngineConfig, serve_config: ServeConfig, environment: Mapping[str, str]
    ) -> "AppSettings":
        """Take them from the options and from the environment."""
        return cls(
            served_names=serve_config.served_model_name,
            api_key=serve_config.api_key,
            metrics_prefix=serve_config.metrics_prefix,
            max_body_bytes=serve_config.max_body_mib << 20,
            allow_lora_updates=environment.get(ALLOW_VARIABLE, "") == "1",
            block_size=engine_config.block_size,
            max_num_seqs=engine_config.max_num_seqs,
            version=__version__,
        )
