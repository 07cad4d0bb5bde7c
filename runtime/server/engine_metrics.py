"""The engine's families of ``/metrics``, read at the scrape."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import Metric

from ..engine.messages import EngineStats, ModelInfo
from .families import Families

_STEP_TOKENS = tuple(1 << power for power in range(16))  # bounds of the tokens of steps


def engine_families(
    families: Families, stats: EngineStats, info: ModelInfo, block_size: int
) -> Iterator[Metric]:
    """Yield all families without names of adapters."""
    yield from _load(families, stats)
    yield families.info(
        "cache_config_info",
        "The KV cache.",
        {"block_size": str(block_size), "num_gpu_blocks": str(stats.kv_blocks_total)},
    )
    yield from _choices(families, info)
    yield from _memory(families, stats)
    yield from _transfers(families, stats)
    yield from _prefixes(families, stats)
    yield from _scheduling(families, stats)
    yield from _totals(families, stats)


def _load(families: Families, stats: EngineStats) -> Iterator[Metric]:
    yield families.gauge("num_requests_waiting", "Waiting requests.", stats.num_waiting)
    yield families.gauge("num_requests_running", "Running requests.", stats.num_running)
    num_deferred = min(stats.num_deferred, stats.num_waiting)  # which is newer
    yield families.gauges(
        "num_requests_waiting_by_reason",
        "Waiting requests, for memory and slots (capacity) or for anything else (deferred).",
        ("reason",),
        [(("capacity",), stats.num_waiting - num_deferred), (("deferred",), num_deferred)],
    )
    yield families.gauge(
        "kv_cache_usage_perc", "Share of KV blocks that requests hold; 1 means all.", stats.kv_cache_usage
    )
    yield families.gauge(
        "decode_gap_bound_seconds",
        "Seconds that --max-decode-gap-s or its default gave the last step that computed a prompt "
        "while other requests decoded; 0 before the first.",
        stats.decode_gap_bound_s,
    )
    workers = stats.cpu_workers
    yield families.gauge("cpu_workers", "Planned CPU workers.", workers.num_workers)
    yield families.gauge("cpu_workers_ready", "CPU workers that accept work.", workers.num_ready)
    threads = stats.threads
    yield families.gauge("cpu_threads", "Threads that compute on the CPU.", threads.num_threads)
    yield families.gauge(
        "cpu_wait_share",
        "Recent share of runnable time in which these threads had no core.",
        threads.waited_share,
    )


def _choices(families: Families, info: ModelInfo) -> Iterator[Metric]:
    """The engine's choices on this machine, including fall-backs."""
    yield families.gauge(
        "profile_failed",
        "1 if the machine could not be measured, so that co-execution is off.",
        float(info.has_profile_failed),
    )
    yield families.info(
        "device_info", "How the device synchronizes and copies with the host.", info.device_choices
    )
    yield families.gauges(
        "backend_info",
        "Backend of each operation; on a GPU, torch for LoRA or attention is slow.",
        ("computes", "backend"),
        [(choice, 1.0) for choice in info.backends.items()],
    )


def _memory(families: Families, stats: EngineStats) -> Iterator[Metric]:
    """Memory by level, and what is evicted when it runs short."""
    yield families.gauges(
        "memory_bytes",
        "Memory by level and kind. Bytes reserved for growth are also free or history.",
        ("level", "kind"),
        [
            ((level, kind), num_bytes)
            for level, kinds in stats.memory_bytes.items()
            for kind, num_bytes in kinds.items()
        ],
    )
    yield families.gauge(
        "memory_short",
        "1 while the machine runs short of memory and idle KV and adapters are evicted.",
        float(stats.is_memory_short),
    )
    yield families.count(
        "memory_given_way_bytes", "Idle KV and adapters evicted for that.", stats.relieved_bytes
    )
    yield families.gauge("invalid_kv_bytes", "KV on the device without its adapter.", stats.invalid_kv_bytes)


def _transfers(families: Families, stats: EngineStats) -> Iterator[Metric]:
    """Copies over the link, loads, evictions and prefetches of adapters."""
    labels = ("direction", "kind")
    yield families.counts(
        "link_bytes",
        "Bytes copied between host and device.",
        labels,
        [((one.direction, one.kind), one.num_bytes) for one in stats.link],
    )
    yield families.counts(
        "link_busy_seconds",
        "Seconds in which a copy was under way.",
        labels,
        [((one.direction, one.kind), one.busy_s) for one in stats.link],
    )
    yield families.counts(
        "lora_adapter_evictions",
        "Evictions of adapters, by level and reason.",
        ("level", "reason"),
        [
            ((level, reason), number)
            for level, reasons in stats.adapter_evictions.items()
            for reason, number in reasons.items()
        ],
    )
    yield families.summary(
        "lora_adapter_load_seconds",
        "Loads of adapters between levels.",
        "transition",
        {name: (loads.num_loads, loads.duration_s) for name, loads in stats.adapter_loads.items()},
    )
    yield families.counts_by(
        "adapter_prefetches",
        "Prefetches of adapters, by whether a request used them.",
        "outcome",
        {"hit": stats.num_prefetch_hits, "miss": stats.num_prefetch_misses},
    )
    yield families.count(
        "adapter_prefetch_wasted_bytes",
        "Bytes of prefetches that no request used.",
        stats.prefetch_missed_bytes,
    )


def _prefixes(families: Families, stats: EngineStats) -> Iterator[Metric]:
    """Hits of prefix caches."""
    num_found, num_copied = stats.prompt_tokens_cached, stats.prompt_tokens_host_cached
    # ``prompt_tokens`` counts answered prompts only.
    sources = {
        "local_compute": stats.prompt_tokens_computed,
        "local_cache_hit": num_found,
        "external_kv_transfer": num_copied,
    }
    yield families.counts_by(
        "prompt_tokens_by_source", "Prompt tokens, by the source of their KV.", "source", sources
    )
    yield families.count(
        "prompt_tokens_cached", "Prompt tokens that were not computed.", num_found + num_copied
    )
    yield families.counts_by(
        "prompt_tokens_cached_by_source",
        "Prompt tokens not computed, by the source of their KV.",
        "source",
        {"device": num_found, "host": num_copied},
    )
    num_sought = sum(sources.values())
    yield families.count("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", num_sought)
    yield families.count("prefix_cache_hits", "Prompt tokens with KV on the device.", num_found)
    yield families.count(
        "external_prefix_cache_queries", "Prompt tokens without KV on the device.", num_sought - num_found
    )
    yield families.count(
        "external_prefix_cache_hits", "Prompt tokens with KV copied from the host.", num_copied
    )


def _scheduling(families: Families, stats: EngineStats) -> Iterator[Metric]:
    yield families.counts_by("num_preemptions", "Preempted requests, by cause.", "cause", stats.preemptions)
    yield families.gauges(
        "scheduling_policy",
        "Gauges of the scheduling policy.",
        ("gauge",),
        [((name,), value) for name, value in stats.policy_counts.items()],
    )
    yield families.counts_by(
        "time_to_first_token_part_seconds",
        "Time to first token in the engine, by part.",
        "part",
        stats.first_token_parts_s,
    )
    yield families.counts_by(
        "adapter_cold_starts",
        "Requests without their adapter on the device, by start strategy.",
        "strategy",
        stats.cold_starts,
    )


def _totals(families: Families, stats: EngineStats) -> Iterator[Metric]:
    num_up_to = accumulate(stats.steps_by_tokens.get(bound, 0) for bound in _STEP_TOKENS)
    buckets = [
        (str(float(bound)), float(number)) for bound, number in zip(_STEP_TOKENS, num_up_to, strict=True)
    ]
    num_steps = float(sum(stats.steps_by_tokens.values()))
    yield families.buckets("iteration_tokens_total", [*buckets, ("+Inf", num_steps)], stats.num_step_tokens)
    workers = stats.cpu_workers
    for name, text, value in (
        ("engine_steps", "Steps of the engine.", stats.num_steps),
        ("engine_failed_steps", "Steps that failed.", stats.num_failed_steps),
        ("retried_rows", "Rows computed again after a failure.", stats.num_retried_rows),
        ("cpu_seconds", "Seconds that the computing threads ran.", stats.threads.ran_s),
        ("cpu_wait_seconds", "Seconds that the computing threads waited for a core.", stats.threads.waited_s),
        ("cpu_worker_restarts", "CPU workers replaced.", workers.num_restarts),
        ("cpu_worker_failed_jobs", "Jobs of dead workers.", workers.num_failed_jobs),
    ):
        yield families.count(name, text, value)
