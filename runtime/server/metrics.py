"""What ``/metrics`` shows: counted here per request, read from the engine at the scrape.

Owns its own registry; nothing is global, so several servers can live in one process. Labels are
bounded: outcomes, routes and status codes are closed sets, adapters are capped.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from .adapter_metrics import adapter_families
from .engine_metrics import engine_families
from .engine_port import EnginePort
from .families import Families
from .settings import AppSettings

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
        self._families = Families(settings.metrics_prefix, model_name)
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
        engine = self._engine
        yield self._families.gauge(
            "engine_alive", "1 while the engine lives.", 0.0 if engine.error else 1.0
        )
        yield self._families.gauge(
            "engine_state_age_seconds", "Since the engine told what follows.", engine.stats_age_s
        )
        stats = engine.get_stats()
        yield from engine_families(
            self._families, stats, engine.get_model_info(), self._settings.block_size
        )
        yield from adapter_families(
            self._families, stats, engine.list_loras(), self._settings.max_num_seqs
        )
        yield from self._requests()
        yield self._histogram("time_to_first_token_seconds", self.first_token_s)
        yield self._histogram("inter_token_latency_seconds", self.inter_token_s)
        yield self._histogram("e2e_request_latency_seconds", self.request_s)

    def _requests(self) -> Iterator[Metric]:
        families = self._families
        yield families.count(
            "prompt_tokens", "Tokens of prompts that were answered.", self.prompt_tokens
        )
        yield families.count("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield families.counts_by(
            "request_success", "Choices that ended, by reason.", "finished_reason", self.finished
        )
        http = CounterMetricFamily(
            families.name("http_requests"), "HTTP requests.", labels=["method", "handler", "status"]
        )
        for labels, count in sorted(self.http_requests.items()):
            http.add_metric(list(labels), count)
        yield http

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(
            self._families.name(name), name.replace("_", " "), labels=["model_name"]
        )
        family.add_metric([self._families.model_name], histogram.buckets(), histogram.total)
        return family
