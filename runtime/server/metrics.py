"""What ``/metrics`` shows: counted here per request, read from the engine at the scrape.

Owns its own registry; nothing is global, so several servers can live in one process. Labels are
bounded: outcomes, routes and status codes are closed sets, adapters are capped.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from ..adapters.registry import AdapterInfo
from ..engine.messages import EngineStats
from .engine_port import EnginePort
from .settings import AppSettings

MAX_ADAPTER_SERIES = 256
MAX_ADAPTERS_IN_LABEL = 64

_FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_INTER_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_REQUEST_BOUNDS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)


class Histogram:
    """Counts of values up to each bound, and their sum; cheap enough for each chunk of a stream."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(bounds)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)  # not cumulative
        self._total = 0.0

    def observe(self, value: float, *, weight: int = 1) -> None:
        """Count ``value`` ``weight`` times."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._total += value * weight

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._total

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it), ending with +Inf."""
        result = []
        num = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            num += count
            result.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(num)))
        return result


class ServerMetrics:
    """Counters of this server, and the collector that renders them."""

    def __init__(
        self,
        engine: EnginePort,
        settings: AppSettings,
        model_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.first_token_s = Histogram(_FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(_INTER_TOKEN_BOUNDS_S)
        self.request_s = Histogram(_REQUEST_BOUNDS_S)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.http_requests: Counter[tuple[str, str, str]] = Counter()  # method, route, status
        self._engine = engine
        self._settings = settings
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition and its content type, in the format that ``accept`` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Sequence[Metric]:
        """Return nothing: names are known only with the prefix, and collecting them is cheap."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families of the moment."""
        yield from self._engine_gauges()
        yield from self._adapter_gauges()
        yield from self._counters()
        yield self._histogram("time_to_first_token_seconds", self.first_token_s)
        yield self._histogram("inter_token_latency_seconds", self.inter_token_s)
        yield self._histogram("e2e_request_latency_seconds", self.request_s)

    def _name(self, name: str) -> str:
        return f"{self._settings.metrics_prefix}:{name}"

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._name(name), text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _engine_gauges(self) -> Iterator[Metric]:
        stats = self._engine.get_stats()
        yield self._gauge("num_requests_waiting", "Requests that wait.", stats.num_waiting)
        yield self._gauge("num_requests_running", "Requests that run.", stats.num_running)
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "KV blocks that requests hold; 1 means all.", used)
        yield self._gauge(
            "kv_blocks_invalid", "KV blocks without their adapter.", stats.kv_blocks_invalid
        )
        cache = GaugeMetricFamily(
            self._name("cache_config_info"),
            "The KV cache.",
            labels=["block_size", "num_gpu_blocks"],
        )
        cache.add_metric([str(self._settings.block_size), str(stats.kv_blocks_total)], 1.0)
        yield cache
        yield from self._choices()
        yield self._gauge("adapter_bytes", "Device memory of adapters.", stats.adapter_bytes_used)
        workers = stats.cpu_workers
        yield self._gauge("cpu_workers", "Planned CPU workers.", workers.num_workers)
        yield self._gauge("cpu_workers_ready", "CPU workers that take work.", workers.num_ready)
        alive = 0.0 if self._engine.error else 1.0
        yield self._gauge("engine_alive", "1 while the engine lives.", alive)

    def _choices(self) -> Iterator[Metric]:
        """What the engine works with on this machine; a fall-back shows here."""
        info = self._engine.get_model_info()
        yield self._gauge(
            "profile_failed",
            "1 if the machine could not be measured, so that co-execution is off.",
            float(info.has_profile_failed),
        )
        choices = info.device_choices
        device = GaugeMetricFamily(
            self._name("device_info"),
            "How the device works with host memory and CPU workers.",
            labels=list(choices),
        )
        device.add_metric(list(choices.values()), 1.0)
        yield device
        backends = GaugeMetricFamily(
            self._name("backend_info"),
            "What is computed, and by what: torch for LoRA or attention on a GPU is a slow loop.",
            labels=["model_name", "computes", "backend"],
        )
        for computes, backend in info.backends.items():
            backends.add_metric([self._model_name, computes, backend], 1.0)
        yield backends

    def _adapter_gauges(self) -> Iterator[Metric]:
        stats = self._engine.get_stats()
        # One series, stamped with the time: of several, readers take the newest.
        info = GaugeMetricFamily(
            self._name("lora_requests_info"),
            "Adapters of running and of waiting requests; the value is the Unix time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running = ",".join(stats.running_adapters[:MAX_ADAPTERS_IN_LABEL])
        waiting = ",".join(stats.waiting_adapters[:MAX_ADAPTERS_IN_LABEL])
        # There are no adapter slots: every running request may use another adapter.
        info.add_metric([str(self._settings.max_num_seqs), running, waiting], time.time())
        yield info
        loaded = [
            adapter
            for adapter in self._engine.list_loras()
            if adapter.state in ("ready", "draining")
        ]
        resident = sum(adapter.resident for adapter in loaded)
        yield self._gauge("num_gpu_loaded_lora_adapters", "Adapters on the device.", resident)
        yield self._gauge(
            "num_cpu_loaded_lora_adapters", "Adapters in host memory only.", len(loaded) - resident
        )
        yield self._loaded_adapters(loaded)

    def _loaded_adapters(self, loaded: Sequence[AdapterInfo]) -> Metric:
        family = GaugeMetricFamily(
            self._name("lora_adapter_loaded"),
            f"One series per adapter held, at most {MAX_ADAPTER_SERIES}.",
            labels=["adapter_name", "level", "pinned", "rank"],
        )
        # A name may have a draining version beside the ready one; the ready one is shown.
        newest = {
            info.name: info for info in sorted(loaded, key=lambda info: info.state == "ready")
        }
        shown = sorted(newest.values(), key=lambda info: (not info.resident, info.name))
        for adapter in shown[:MAX_ADAPTER_SERIES]:
            level = "gpu" if adapter.resident else "cpu"
            family.add_metric([adapter.name, level, "false", str(adapter.rank)], 1.0)
        return family

    def _counters(self) -> Iterator[Metric]:
        stats = self._engine.get_stats()
        for name, text, value in (
            ("num_preemptions", "Requests sent back to waiting.", stats.num_preemptions),
            ("engine_steps", "Steps of the engine.", stats.num_steps),
            ("engine_failed_steps", "Steps that failed.", stats.num_failed_steps),
            ("retried_rows", "Rows that came to nothing, computed again.", stats.num_retried_rows),
            ("cpu_worker_restarts", "CPU workers replaced.", stats.cpu_workers.num_restarts),
            ("cpu_worker_failed_jobs", "Jobs of dead workers.", stats.cpu_workers.num_failed_jobs),
            ("prompt_tokens", "Tokens of prompts that were answered.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
        ):
            yield self._count(name, text, value)
        yield from self._memory_counters(stats)
        yield self._counts(
            "adapter_cold_starts",
            "Requests whose adapter was not on the device, by how they were started.",
            "strategy", stats.cold_starts,
        )  # fmt: skip
        yield self._counts(
            "request_success", "Choices that ended, by reason.", "finished_reason", self.finished
        )
        http = CounterMetricFamily(
            self._name("http_requests"), "HTTP requests.", labels=["method", "handler", "status"]
        )
        for labels, count in sorted(self.http_requests.items()):
            http.add_metric(list(labels), count)
        yield http

    def _memory_counters(self, stats: EngineStats) -> Iterator[Metric]:
        """What was there when it was needed, and what was not."""
        num_found, num_copied = stats.prompt_tokens_cached, stats.prompt_tokens_host_cached
        # Of all prompts: ``prompt_tokens`` are of those that were answered.
        sources = {
            "local_compute": stats.prompt_tokens_computed,
            "local_cache_hit": num_found,
            "external_kv_transfer": num_copied,
        }
        yield self._counts(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from first.",
            "source", sources,
        )  # fmt: skip
        num_sought = sum(sources.values())
        yield self._count("prefix_cache_queries", "Prompt tokens whose KV was sought.", num_sought)
        yield self._count("prefix_cache_hits", "Those of them on the device.", num_found)
        yield self._count("external_prefix_cache_hits", "Those copied from the host.", num_copied)
        yield self._counts(
            "lora_adapter_evictions", "Adapters that left a level of memory.", "level",
            {"gpu": stats.num_device_evictions, "cpu": stats.num_host_evictions},
        )  # fmt: skip
        yield self._counts(
            "adapter_prefetches",
            "Loads of adapters that were expected, by whether they were asked for.",
            "outcome", {"hit": stats.num_prefetch_hits, "miss": stats.num_prefetch_misses},
        )  # fmt: skip
        yield self._count(
            "adapter_prefetch_wasted_bytes", "Of those that were not asked for.",
            stats.prefetch_missed_bytes,
        )  # fmt: skip

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._name(name), text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counts(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(self._name(name), text, labels=["model_name", label])
        for value, count in sorted(counts.items()):
            family.add_metric([self._model_name, value], count)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(
            self._name(name), name.replace("_", " "), labels=["model_name"]
        )
        family.add_metric([self._model_name], histogram.buckets(), histogram.total)
        return family
