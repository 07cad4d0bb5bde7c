"""The content of ``/metrics``: counted here for each request, or read from the engine when scraped.

Owns its own registry; nothing is global, so several servers can live in one process. Labels are
bounded: outcomes, routes and status codes are closed sets, adapters without series of their own
count as ``OTHER``.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import generate_latest

from ..adapters.info import LEVELS, AdapterInfo, num_fitting
from ..adapters.mix import LoRAMix
from ..adapters.names import DRAINING, READY
from ..engine.messages import EngineStats, ModelInfo
from .access import PROBE_PATHS
from .engine_port import EnginePort
from .families import (
    FIRST_TOKEN_BOUNDS_S,
    INTER_TOKEN_BOUNDS_S,
    NUM_TOKENS_BOUNDS,
    REQUEST_BOUNDS_S,
    Families,
    Histogram,
)
from .fields import UnknownFields
from .request_records import HttpRequestRecord, PromptRecord
from .settings import AppSettings

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
    yield families.count(
        "adapter_loads_without_run",
        "Loads for which enough pages were free, but too few adjacent ones.",
        stats.num_loads_without_run,
    )
    yield families.count(
        "memory_extents_evicted", "Groups of pages evicted for such loads.", stats.num_extents_evicted
    )
    yield families.gauge("invalid_kv_bytes", "KV on the device without its adapter.", stats.invalid_kv_bytes)


def _transfers(families: Families, stats: EngineStats) -> Iterator[Metric]:
    """Copies over the link, loads and evictions of adapters."""
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


MAX_ADAPTER_SERIES = 256
MAX_ADAPTERS_IN_LABEL = 64
OTHER = "other"  # the label of all adapters without series of their own


_BY_ADAPTER = (
    ("lora_time_to_first_token_seconds", "histogram", "Time to first token, by adapter."),
    ("lora_prompt_tokens_total", "counter", "Tokens of answered prompts, by adapter."),
    ("lora_generation_tokens_total", "counter", "Tokens generated, by adapter."),
)


@dataclass(slots=True)
class AdapterCount:
    """Counts of one name."""

    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    _shown: tuple[int, int] = (-1, -1)  # tokens of the samples that were written last
    _samples: tuple[bytes, bytes, bytes] = (b"", b"", b"")

    def samples(self, name: str, families: Families) -> tuple[bytes, bytes, bytes]:
        now = self.prompt_tokens, self.generation_tokens  # a first token counts a prompt, too
        if now != self._shown:
            self._shown = now
            labels = families.label_text({"adapter_name": name})
            first, prompt, generation = (families.name(family) for family, *_ in _BY_ADAPTER)
            buckets = self.first_token_s.buckets()
            lines = [f'{first}_bucket{{{labels},le="{le}"}} {count}' for le, count in buckets]
            lines += [
                f"{first}_count{{{labels}}} {buckets[-1][1]}",
                f"{first}_sum{{{labels}}} {self.first_token_s.total}",
                "",
            ]
            self._samples = (
                "\n".join(lines).encode(),
                f"{prompt}{{{labels}}} {self.prompt_tokens}.0\n".encode(),
                f"{generation}{{{labels}}} {self.generation_tokens}.0\n".encode(),
            )
        return self._samples


class AdapterCounts:
    """Counts by name; the first names have series of their own."""

    def __init__(self) -> None:
        self._counts: dict[str, AdapterCount] = {}

    def of(self, name: str | None) -> AdapterCount | None:
        """The counts of an adapter's requests; None for the base model."""
        if name is None:
            return None
        is_new = name not in self._counts
        if is_new and (len(self._counts) >= MAX_ADAPTER_SERIES or LoRAMix.named(name) is not None):
            name = OTHER
        return self._counts.setdefault(name, AdapterCount())

    def exposition(self, families: Families) -> bytes:
        """Return all as text: thousands of lines, few of them changed since the last scrape."""
        known = [count.samples(name, families) for name, count in self._counts.items()]
        text = b""
        for index, (name, kind, help_text) in enumerate(_BY_ADAPTER):
            title = families.name(name)
            text += f"# HELP {title} {help_text}\n# TYPE {title} {kind}\n".encode()
            text += b"".join([samples[index] for samples in known])
        return text


def adapter_families(
    families: Families, stats: EngineStats, adapters: Iterable[AdapterInfo], max_num_seqs: int
) -> Iterator[Metric]:
    """Yield the adapters in use, and the level of each adapter."""
    # One series with the time as its value: readers use the newest. There are no adapter
    # slots: each running request may use another adapter.
    labels = {
        "max_lora": str(max_num_seqs),
        "running_lora_adapters": ",".join(stats.running_adapters[:MAX_ADAPTERS_IN_LABEL]),
        "waiting_lora_adapters": ",".join(stats.waiting_adapters[:MAX_ADAPTERS_IN_LABEL]),
    }
    yield families.info(
        "lora_requests_info",
        "Adapters of running and waiting requests; the value is the Unix time.",
        labels,
        time.time(),
    )
    adapters = tuple(adapters)
    yield families.gauge(
        "max_gpu_lora_adapters",
        "Adapters that fit on the device with the running requests.",
        num_fitting(adapters, stats.adapter_room_bytes),
    )
    yield families.gauge(
        "lora_dir_unreadable_entries",
        "Entries of --lora-dir that cannot be read; their adapters stay as they are.",
        stats.num_unreadable_adapters,
    )
    yield families.gauge(
        "lora_dir_unseen_seconds",
        "Seconds since --lora-dir was last looked at; 0 if they are fewer than 30.",
        stats.lora_dir_unseen_s,
    )
    loaded = [one for one in adapters if one.state in (READY, DRAINING)]
    by_level = Counter(one.residency.level for one in loaded)
    for level in LEVELS:
        text = f"Adapters at the level {level}."
        yield families.gauge(f"num_{level}_loaded_lora_adapters", text, by_level[level])
    yield _loaded(families, loaded)


def _loaded(families: Families, loaded: Sequence[AdapterInfo]) -> Metric:
    """Adapters at faster levels come first among the series by name."""
    ranked = sorted(loaded, key=lambda one: (LEVELS.index(one.residency.level), one.name))
    shown, others = ranked[:MAX_ADAPTER_SERIES], ranked[MAX_ADAPTER_SERIES:]
    samples = [
        ((one.name, one.residency.level, str(one.pinned).lower(), str(one.rank)), 1.0) for one in shown
    ]
    by_level = Counter(one.residency.level for one in others)
    samples += [((OTHER, level, "", ""), float(number)) for level, number in by_level.items()]
    return families.gauges(
        "lora_adapter_loaded",
        f"Adapters by level, {MAX_ADAPTER_SERIES} by name.",
        ("adapter_name", "level", "pinned", "rank"),
        samples,
    )


_VLLM = "vllm"
# The format that every reader knows. Some readers of OpenMetrics change the prefix's colon.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


# The parts of a request's wait before its admission: values of ``scheduler.events.TimePart``.
_QUEUE_PARTS = (
    *("order", "policy_limit", "kv_memory", "adapter_memory"),
    *("disk_read", "adapter_load", "kv_swap_in"),
)


class RequestMetrics:
    """Histograms over requests, one value for each prompt, or for each of its choices."""

    def __init__(self) -> None:
        self._num_prompt_tokens = Histogram(NUM_TOKENS_BOUNDS)
        self._num_computed_tokens = Histogram(NUM_TOKENS_BOUNDS)  # of the prompt
        self._num_generated_tokens = Histogram(NUM_TOKENS_BOUNDS)
        self._max_generated_tokens = Histogram(NUM_TOKENS_BOUNDS)
        self._queue_s = Histogram(REQUEST_BOUNDS_S)
        self._prefill_s = Histogram(REQUEST_BOUNDS_S)
        self._decode_s = Histogram(REQUEST_BOUNDS_S)
        self._inference_s = Histogram(REQUEST_BOUNDS_S)
        self._output_token_s = Histogram(INTER_TOKEN_BOUNDS_S)

    def ended(self, prompt: PromptRecord) -> None:
        """Count a prompt after all its choices have finished."""
        assert prompt.first_token_s is not None
        nums_tokens = [choice.output_tokens for choice in prompt.choices]
        most_tokens = max(nums_tokens)
        self._num_prompt_tokens.observe(prompt.prompt_tokens)
        self._num_computed_tokens.observe(prompt.prompt_tokens - prompt.cached_tokens)
        for num_tokens in nums_tokens:
            self._num_generated_tokens.observe(num_tokens)
        self._max_generated_tokens.observe(most_tokens)
        parts = prompt.choices[0].parts_s
        first_token_s, total_s = prompt.first_token_s, prompt.total_s
        queue_s = min(first_token_s, sum(parts.get(part, 0.0) for part in _QUEUE_PARTS))
        self._queue_s.observe(queue_s)
        self._prefill_s.observe(first_token_s - queue_s)
        self._decode_s.observe(total_s - first_token_s)
        self._inference_s.observe(total_s - queue_s)
        if most_tokens > 1:
            self._output_token_s.observe((total_s - first_token_s) / (most_tokens - 1))

    def families(self, families: Families) -> Iterator[Metric]:
        for name, histogram in (
            ("prompt_tokens", self._num_prompt_tokens),
            ("prefill_kv_computed_tokens", self._num_computed_tokens),
            ("generation_tokens", self._num_generated_tokens),
            ("max_num_generation_tokens", self._max_generated_tokens),
            ("queue_time_seconds", self._queue_s),
            ("prefill_time_seconds", self._prefill_s),
            ("decode_time_seconds", self._decode_s),
            ("inference_time_seconds", self._inference_s),
            ("time_per_output_token_seconds", self._output_token_s),
        ):
            yield families.histogram(f"request_{name}", histogram)


class ServerMetrics:
    """Counters of this server, and the collector that renders them."""

    def __init__(
        self,
        engine: EnginePort,
        settings: AppSettings,
        model_name: str,
        unknown_fields: UnknownFields,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        self.requests = RequestMetrics()
        self.adapters = AdapterCounts()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0, refused=0)
        self.http_requests: Counter[tuple[str, str, str]] = Counter()  # method, route, status
        self.http_s: defaultdict[tuple[str, str], float] = defaultdict(float)  # seconds they took
        self.connections_ended: Counter[str] = Counter(  # by reason, before the application
            header_timeout=0,
            body_timeout=0,
            head_too_large=0,
            invalid_http=0,
            slow_reader=0,
            too_many_connections=0,
            too_many_idle_connections=0,
        )
        self._engine = engine
        self._settings = settings
        self._unknown_fields = unknown_fields
        self._families = Families(settings.metrics_prefix, model_name)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if settings.metrics_prefix == _VLLM:
            ProcessCollector(registry=self._registry)

    def ended(self, record: HttpRequestRecord) -> None:
        """Count a request that generates, at its end, with any outcome."""
        self.finished.update(record.finish_reasons)
        for prompt in record.prompts:
            if prompt.is_complete:
                self.request_s.observe(prompt.total_s)
                self.requests.ended(prompt)

    def answered(self, method: str, route: str, status: str, took_s: float) -> None:
        """Count a request that was answered, or that its client left before."""
        self.http_requests[method, route, status] += 1
        self.http_s[method, route] += took_s

    def render(self) -> bytes:
        """Return the exposition; its content type is ``CONTENT_TYPE``."""
        return generate_latest(self._registry) + self.adapters.exposition(self._families)

    def describe(self) -> Sequence[Metric]:
        """Return nothing: the names depend on the prefix, and ``collect`` is cheap."""
        return ()

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield self._families.gauge(
            "engine_alive", "1 while the engine is alive.", 0.0 if engine.error else 1.0
        )
        yield self._families.gauge(
            "engine_state_age_seconds",
            "Seconds since the engine published the statistics below.",
            engine.stats_age_s,
        )
        yield self._families.gauge(
            "engine_stalled_seconds",
            "Seconds since the engine's last progress; 0 while it has no work.",
            engine.hang_watch.stalled_s,
        )
        stats = engine.get_stats()
        yield from engine_families(self._families, stats, engine.get_model_info(), self._settings.block_size)
        yield from adapter_families(self._families, stats, engine.list_loras(), self._settings.max_num_seqs)
        yield from self._requests()
        families = self._families
        yield families.histogram("time_to_first_token_seconds", self.first_token_s)
        yield families.histogram("inter_token_latency_seconds", self.inter_token_s)
        yield families.histogram("e2e_request_latency_seconds", self.request_s)
        yield from self.requests.families(families)
        if self._settings.metrics_prefix == _VLLM:  # older dashboards use older names
            yield families.gauge(
                "gpu_cache_usage_perc", "The same as kv_cache_usage_perc.", stats.kv_cache_usage
            )
            yield families.histogram("time_per_output_token_seconds", self.inter_token_s)
            yield from self._http_without_prefix()

    def _http_without_prefix(self) -> Iterator[Metric]:
        """Yield the HTTP metrics of vLLM's server, without probes."""
        requests, number = Counter[tuple[str, str, str]](), Counter[tuple[str, str]]()
        for (method, route, status), count in self.http_requests.items():
            if route not in PROBE_PATHS:
                kind = f"{status[0]}xx" if status.isdigit() else status
                requests[method, route, kind] += count
                number[method, route] += count
        counts = CounterMetricFamily(
            "http_requests", "HTTP requests.", labels=["method", "handler", "status"]
        )
        for labels, count in sorted(requests.items()):
            counts.add_metric(labels, count)
        yield counts
        seconds = SummaryMetricFamily(
            "http_request_duration_seconds",
            "Seconds until the answer had ended.",
            labels=["method", "handler"],
        )
        for key, count in sorted(number.items()):
            seconds.add_metric(key, count, self.http_s[key])
        yield seconds

    def _requests(self) -> Iterator[Metric]:
        families = self._families
        yield families.count("prompt_tokens", "Tokens of answered prompts.", self.prompt_tokens)
        yield families.count("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield families.counts_by(
            "request_success",
            "Choices by finish reason, requests without choices by outcome.",
            "finished_reason",
            self.finished,
        )
        yield families.count(
            "unknown_fields", "Unknown fields of bodies that were ignored.", self._unknown_fields.num_seen
        )
        yield from families.http(self.connections_ended, self.http_requests)
