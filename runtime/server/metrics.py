"""What ``/metrics`` shows: counted here per request, read from the engine at the scrape.

Owns its own registry; nothing is global, so several servers can live in one process. Labels are
bounded: outcomes, routes and status codes are closed sets, adapters are capped.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from .adapter_metrics import AdapterCounts, adapter_families
from .engine_metrics import engine_families
from .engine_port import EnginePort
from .families import Families
from .histogram import FIRST_TOKEN_BOUNDS_S, INTER_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S, Histogram
from .settings import AppSettings


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
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self.request_s = Histogram(REQUEST_BOUNDS_S)
        self.adapters = AdapterCounts()
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
        families = self._families
        yield families.histogram("time_to_first_token_seconds", self.first_token_s)
        yield families.histogram("inter_token_latency_seconds", self.inter_token_s)
        yield families.histogram("e2e_request_latency_seconds", self.request_s)
        yield from self.adapters.families(families)

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
