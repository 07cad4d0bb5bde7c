"""Groups of options for ``--help``: what it shows, and what only ``--help-all`` shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options under one heading, by the names of their fields."""

    title: str
    common: tuple[str, ...]  # the most used first
    rest: tuple[str, ...] = ()


_SERVE_GROUPS = (
    OptionGroup(
        "Model",
        ("model", "dtype", "quantization", "max_model_len", "trust_remote_code"),
        (
            "revision",
            "lm_head_quantization",
            "chat_template",
            "response_template",
            "skip_parity_probe",
            "seed",
        ),
    ),
    OptionGroup(
        "Adapters",
        ("lora_dir", "lora_modules", "max_lora_rank"),
        (
            "lora_resolver",
            "max_hub_adapter_mib",
            "max_hub_adapters",
            "max_hub_gib",
            "pin",
            "preload",
            "watch_lora_dir",
            "adapter_templates",
            "lora_state_file",
            "prefetch_requests",
            "load_strategy",
            "max_assisted_tokens_per_step",
            "cold_priority",
            "max_assisted_stall",
        ),
    ),
    OptionGroup(
        "Server",
        ("host", "port", "served_model_name", "api_key", "admin_key"),
        (
            "api_key_file",
            "admin_key_file",
            "allow_runtime_lora_updating",
            "allowed_lora_dirs",
            "metrics_need_key",
            "health_needs_key",
            "allowed_origins",
            "unknown_fields",
            "sse_keep_alive_s",
            "drain_timeout_s",
            "engine_hang_s",
        ),
    ),
    OptionGroup(
        "Scheduling",
        ("max_num_seqs", "max_num_batched_tokens", "max_num_waiting"),
        (
            "max_queue_s",
            "max_decode_gap_s",
            "slo_ttft_s",
            "scheduling_policy",
            "output_predictor",
            "growth_headroom",
        ),
    ),
    OptionGroup(
        "Memory",
        ("memory_gib", "host_bytes"),
        ("memory_fraction", "prefix_cache", "adapter_memory_fraction", "memory_policy", "block_size"),
    ),
    OptionGroup(
        "Device and CPU",
        ("device", "cpu_threads", "cpu_cores"),
        (
            "fixed_cpu_threads",
            "engine_cores",
            "profile",
            "cpu_isa",
            "linear_backend",
            "attention_backend",
            "lora_backend",
            "delta_backend",
            "fused_kernels",
            "decode_graphs",
            "device_sync",
            "worker_slowdown",
            "link_gib_per_s",
            "link_latency_us",
        ),
    ),
    OptionGroup(
        "Logs and metrics", ("log_level", "request_log"), ("request_log_mib", "log_slow_s", "metrics_prefix")
    ),
    OptionGroup(
        "Limits of requests and connections",
        (),
        (
            "max_body_mib",
            "max_bodies_mib",
            "max_json_depth",
            "max_json_items",
            "max_messages",
            "max_content_parts",
            "max_request_tokens",
            "max_tokenize_tokens",
            "max_waiting_chars",
            "max_stop_strings",
            "max_stop_bytes",
            "max_bad_words_bytes",
            "max_logit_bias",
            "template_timeout_s",
            "max_template_chars",
            "max_connections",
            "max_idle_connections",
            "header_timeout_s",
            "body_timeout_s",
            "max_unsent_kib",
            "unsent_timeout_s",
        ),
    ),
)

_CLUSTER_GROUPS = (
    OptionGroup(
        "Cluster",
        ("engines", "engine", "ray", "gateways", "router", "controller", "state_dir", "cluster_key_file"),
        (
            "placement",
            "operating_points",
            "placement_interval_s",
            "min_copies",
            "adapter_cache_gib",
            "cluster_name",
            "cluster_host",
            "cluster_port",
            "unpinned",
        ),
    ),
)

_SIMULATE_GROUPS = (
    OptionGroup(
        "Simulation",
        ("workload", "rps", "requests", "seeds", "compare", "sweep", "out", "quick"),
        ("percentile", "traces", "jobs", "horizon_s", "force"),
    ),
    OptionGroup(
        "Several servers",
        ("servers", "router", "placement"),
        ("placement_every_s", "operating_points", "routers", "state_age_s", "store_bytes", "peer_gib_per_s"),
    ),
)

# Options of engines and servers that the help of other commands than serve shows.
_SHOWN: Mapping[str, tuple[str, ...]] = {
    "cluster": (
        "model",
        "dtype",
        "quantization",
        "max_model_len",
        "lora_dir",
        "lora_modules",
        "host",
        "port",
        "served_model_name",
        "api_key",
        "admin_key",
        "log_level",
    ),
    "gateway": ("host", "port", "api_key", "admin_key", "log_level"),
    "profile": (
        "model",
        "dtype",
        "quantization",
        "device",
        "cpu_threads",
        "cpu_cores",
        "max_num_batched_tokens",
    ),
    "simulate": ("profile", "memory_gib", "max_num_seqs", "scheduling_policy", "slo_ttft_s"),
    "plan": ("profile", "memory_gib", "max_num_seqs", "scheduling_policy", "slo_ttft_s"),
}


def groups_of(command: str) -> Sequence[OptionGroup]:
    """Return the groups in which ``corun COMMAND`` shows its options, its own before others."""
    if command in ("simulate", "plan"):
        return _SIMULATE_GROUPS + _SERVE_GROUPS
    if command.startswith(("cluster", "gateway")):
        return _CLUSTER_GROUPS + _SERVE_GROUPS
    return _SERVE_GROUPS


def is_common(command: str, group: OptionGroup, name: str) -> bool:
    """Whether ``corun COMMAND --help`` shows the option of this name."""
    if group in _SERVE_GROUPS and command in _SHOWN:
        return name in _SHOWN[command]
    return name in group.common
