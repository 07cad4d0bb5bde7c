"""The content of ``/metrics``: counted here for each request, or read from the engine when scraped.

Owns its own registry; nothing is global, so several servers can live in one process. Labels are
bounded: outcomes, routes and status codes are closed sets, adapters without series of their own
count as ``OTHER``.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import generate_latest

from ..adapters.info import LEVELS, AdapterInfo, num_fitting
from ..adapters.mix import LoRAMix
from ..adapters.names import DRAINING, READY
from ..engine.messages import EngineStats
from .access import PROBE_PATHS
from .engine_metrics import engine_families
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
        """Return the lines of each of ``_BY_ADAPTER``."""
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
        """Yield all families."""
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
        """Yield all metric families."""
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
