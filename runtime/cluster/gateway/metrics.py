"""A gateway's ``/metrics``: its engines and its routing."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from ...server.families import Families, Histogram
from .state import GatewayState


class GatewayMetrics:
    """A Prometheus collector with a registry of its own."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self._registry)

    def describe(self) -> Sequence[Metric]:
        """Return nothing: names depend on the prefix."""
        return ()

    def collect(self) -> Iterator[Metric]:
        cards = self._state.base_cards()
        families = Families(self._state.settings.metrics_prefix, cards[0].id if cards else "unknown")
        yield from self._engines(families)
        yield from self._engine_counts(families)
        yield from self._gateway(families)

    def _engines(self, families: Families) -> Iterator[Metric]:
        """Yield gauges of engines that are in the table now."""
        links = self._state.links
        for name, text, values in (
            (
                "in_flight",
                "Open requests, by engine.",
                {engine_id: float(len(link.open)) for engine_id, link in links.items()},
            ),
            (
                "usable",
                "1 while an engine gets requests.",
                {engine_id: float(link.is_usable) for engine_id, link in links.items()},
            ),
            (
                "state_age_seconds",
                "Seconds since an engine's last heartbeat.",
                {engine_id: link.health.silent_s for engine_id, link in links.items()},
            ),
        ):
            samples = [((engine_id,), value) for engine_id, value in values.items()]
            yield families.gauges(f"gateway_engine_{name}", text, ("engine",), samples)

    def _engine_counts(self, families: Families) -> Iterator[Metric]:
        """Yield counts of all engines since the gateway started."""
        engines = self._state.counts.engines
        yield families.counts_by(
            "gateway_engine_requests",
            "Requests sent, by engine.",
            "engine",
            {engine_id: one.num_requests for engine_id, one in engines.items()},
        )
        yield families.counts_by(
            "gateway_engine_retries",
            "Requests that failed at an engine and were sent to another one.",
            "engine",
            {engine_id: one.num_retried for engine_id, one in engines.items()},
        )
        yield families.counts(
            "gateway_engine_ejections",
            "Ejections, by engine and cause.",
            ("engine", "cause"),
            [
                ((engine_id, cause), number)
                for engine_id, one in engines.items()
                for cause, number in sorted(one.num_ejections.items())
            ],
        )
        for name, text, attribute in (
            (
                "first_token_seconds",
                "Time from sending a stream's request to its first token.",
                "first_token_s",
            ),
            ("predicted_first_token_seconds", "Predicted time to the first token.", "predicted_s"),
            ("first_token_ratio", "Measured over predicted time to the first token.", "ratio"),
        ):
            yield _histograms(
                families,
                f"gateway_{name}",
                text,
                {engine_id: getattr(one, attribute) for engine_id, one in engines.items()},
            )

    def _gateway(self, families: Families) -> Iterator[Metric]:
        state, counts = self._state, self._state.counts
        yield families.histogram("gateway_decision_seconds", counts.decision_s)
        yield families.count(
            "gateway_lost", "Streams that ended with an error after their first byte.", counts.num_lost
        )
        yield families.gauge(
            "gateway_hears_controller",
            "1 while the gateway is connected to the controller.",
            float(state.is_connected),
        )
        yield families.counts_by(
            "gateway_ensures",
            "Adapter loads before a request is routed, by result.",
            "result",
            state.load_before_route.num_by_result,
        )
        yield families.count(
            "gateway_ensure_seconds", "Total time of these adapter loads.", state.load_before_route.total_s
        )
        yield from families.http(counts.connections_ended, counts.http_requests)


def _histograms(families: Families, name: str, text: str, by_engine: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(families.name(name), text, labels=["model_name", "engine"])
    for engine_id, histogram in sorted(by_engine.items()):
        labels = [families.model_name, engine_id]
        family.add_metric(labels, histogram.buckets(), histogram.total)
    return family
