"""Metric families of ``/metrics``, with the prefix and the model's label, and their histograms."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
INTER_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
REQUEST_BOUNDS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)

NUM_TOKENS_BOUNDS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    *(10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000),
)


class Histogram:
    """Counts of values up to each bound, and their sum; cheap enough for each chunk of a stream."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(bounds)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)  # not cumulative
        self.total = 0.0  # of all values

    def observe(self, value: float, *, weight: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += weight
        self.total += value * weight

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it), ending with +Inf."""
        result = []
        num = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            num += count
            result.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(num)))
        return result


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Families:
    """Makes metric families of one server."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self.model_name = model_name
        self._prefix = prefix

    def name(self, name: str) -> str:
        """With the prefix."""
        return f"{self._prefix}:{name}"

    def label_text(self, labels: Mapping[str, str]) -> str:
        """Return the labels of a sample as text, including the model's."""
        pairs = {"model_name": self.model_name, **labels}.items()
        return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, (), [((), value)])

    def gauges(
        self, name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
    ) -> Metric:
        """Return a gauge by labels beside the model's."""
        family = GaugeMetricFamily(self.name(name), text, labels=["model_name", *labels])
        for values, value in samples:
            family.add_metric([self.model_name, *values], value)
        return family

    def info(self, name: str, text: str, labels: Mapping[str, str], value: float = 1.0) -> Metric:
        family = GaugeMetricFamily(self.name(name), text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def count(self, name: str, text: str, value: float) -> Metric:
        """Return a counter with one total."""
        return self.counts(name, text, (), [((), value)])

    def counts(
        self, name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
    ) -> Metric:
        """Return a counter by labels beside the model's."""
        family = CounterMetricFamily(self.name(name), text, labels=["model_name", *labels])
        for values, value in samples:
            family.add_metric([self.model_name, *values], value)
        return family

    def summary(self, name: str, text: str, label: str, totals: Mapping[str, tuple[int, float]]) -> Metric:
        """Return a summary (count and sum) by one label."""
        family = SummaryMetricFamily(self.name(name), text, labels=["model_name", label])
        for value, (count, total) in sorted(totals.items()):
            family.add_metric([self.model_name, value], count, total)
        return family

    def histogram(self, name: str, histogram: Histogram) -> Metric:
        return self.buckets(name, histogram.buckets(), histogram.total)

    def buckets(self, name: str, buckets: Sequence[tuple[str, float]], total: float) -> Metric:
        """Return a histogram; ``buckets``: upper bound and number of values up to it."""
        family = HistogramMetricFamily(self.name(name), name.replace("_", " "), labels=["model_name"])
        family.add_metric([self.model_name], buckets, total)
        return family

    def counts_by(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        """Return a counter by one label, ordered by its values."""
        samples = [((value,), count) for value, count in sorted(counts.items())]
        return self.counts(name, text, (label,), samples)

    def http(
        self, ended: Mapping[str, int], requests: Mapping[tuple[str, str, str], int]
    ) -> Iterator[Metric]:
        """Yield ended connections by reason, and requests by method, route and status."""
        text = "Connections that the server ended, by reason."
        yield self.counts_by("http_connections_ended", text, "reason", ended)
        labels = ["method", "handler", "status"]
        family = CounterMetricFamily(self.name("http_requests"), "HTTP requests.", labels=labels)
        for values, count in sorted(requests.items()):
            family.add_metric(values, count)
        yield family
