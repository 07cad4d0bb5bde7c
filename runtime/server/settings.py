"""Configuration of the HTTP application. Imported before any module of HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ... import __version__
from ..config.engine import EngineConfig
from ..config.serve import ServeConfig
from ..engine.messages import ModelInfo
from ..limits import MAX_DEFAULT_BODY_BYTES, HttpLimits, HubLimits, TemplateLimits, default_body_bytes
from .access import Access

# Longest wait of an answer for the engine's statistics. A step may take longer; the answer then has
# the last statistics.
STATS_TIMEOUT_S = 0.25
MAX_STATS_AGE_S = 0.1  # older statistics are refreshed for the next request


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Configuration of the HTTP application; the engine's facts come from the engine."""

    served_names: Sequence[str] = ()  # of the base model; empty = its own name
    access: Access = field(default_factory=Access)
    allowed_origins: Sequence[str] = ()  # of pages in browsers
    metrics_prefix: str = "corun"  # gives corun:num_requests_running
    unknown_fields: str = "warn"
    limits: HttpLimits = field(default_factory=HttpLimits)
    sizes_bodies_by_model: bool = False  # without --max-body-mib
    sse_keep_alive_s: float = 15.0  # of silence in a stream before it gets a comment
    allow_lora_updates: bool = False
    allowed_lora_dirs: Sequence[str] = ()  # directories that adapters are loaded from; empty = any
    block_size: int = 16  # tokens
    max_num_seqs: int = 256
    version: str = "unknown"

    @classmethod
    def of(cls, engine_config: EngineConfig, serve_config: ServeConfig, access: Access) -> "AppSettings":
        return cls(
            served_names=serve_config.served_model_name,
            access=access,
            allowed_origins=serve_config.allowed_origins,
            metrics_prefix=serve_config.metrics_prefix,
            unknown_fields=serve_config.unknown_fields,
            limits=replace(
                limits_of(serve_config),
                max_logit_bias=engine_config.max_logit_bias,
                max_stop_strings=engine_config.max_stop_strings,
                max_stop_bytes=engine_config.max_stop_bytes,
                max_bad_words_bytes=engine_config.max_bad_words_bytes,
            ),
            sizes_bodies_by_model=serve_config.max_body_mib is None,
            sse_keep_alive_s=serve_config.sse_keep_alive_s,
            allow_lora_updates=serve_config.allow_runtime_lora_updating or bool(access.admin),
            allowed_lora_dirs=serve_config.allowed_lora_dirs,
            block_size=engine_config.block_size,
            max_num_seqs=engine_config.max_num_seqs,
            version=__version__,
        )

    def of_model(self, info: ModelInfo) -> "AppSettings":
        """Return these settings with the limits that follow from the model."""
        limits = replace(
            self.limits,
            vocab_size=info.vocab_size,
            max_json_items=max(self.limits.max_json_items, 2 * info.max_model_len),
            max_tokenize_tokens=max(self.limits.max_tokenize_tokens, info.max_model_len),
        )
        if self.sizes_bodies_by_model:
            limits = replace(limits, max_body_bytes=default_body_bytes(info.max_model_len))
        return replace(self, limits=limits)


def limits_of(config: ServeConfig) -> HttpLimits:
    """Return the limits on clients that the options describe."""
    max_body_mib = config.max_body_mib
    return HttpLimits(
        max_body_bytes=MAX_DEFAULT_BODY_BYTES if max_body_mib is None else max_body_mib << 20,
        max_bodies_bytes=config.max_bodies_mib << 20,
        max_json_depth=config.max_json_depth,
        max_json_items=config.max_json_items,
        max_messages=config.max_messages,
        max_content_parts=config.max_content_parts,
        max_tokenize_tokens=config.max_tokenize_tokens,
        max_request_tokens=config.max_request_tokens,
        template=TemplateLimits(timeout_s=config.template_timeout_s, max_chars=config.max_template_chars),
        max_connections=config.max_connections,
        max_idle_connections=config.max_idle_connections,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        max_unsent_bytes=config.max_unsent_kib << 10,
        unsent_timeout_s=config.unsent_timeout_s,
    )


def hub_limits_of(config: ServeConfig) -> HubLimits:
    """Return the limits on adapters of the hub that the options describe."""
    return HubLimits(
        max_adapter_bytes=config.max_hub_adapter_mib << 20,
        max_adapters=config.max_hub_adapters,
        max_cache_bytes=config.max_hub_gib << 30,
    )
