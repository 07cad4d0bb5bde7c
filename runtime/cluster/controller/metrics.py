"""The controller's ``/metrics``: copies, fetches and placement."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from ...server.metrics import MAX_ADAPTER_SERIES, OTHER
from .members import Members
from .placing import Placing
from .pool import CopyPool
from .table import RoutingTable


class _Collector:
    """Collects metrics from the controller's parts."""

    def __init__(self, table: RoutingTable, pool: CopyPool, members: Members, placing: Placing) -> None:
        self._table = table
        self._pool = pool
        self._members = members
        self._placing = placing

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        table, copies = self._table, self._pool.num_copies()
        by_name = Counter[str]()
        for number, entry in enumerate(table.adapters.values()):
            name = entry.name if number < MAX_ADAPTER_SERIES else OTHER
            by_name[name] += copies.get(entry.digest, 0)
        family = GaugeMetricFamily(
            "corun_cluster_adapter_copies",
            "Copies of an adapter's files, by adapter.",
            labels=["adapter_name"],
        )
        for name, number in by_name.items():
            family.add_metric([name], number)
        yield family
        numbers = [len(agent.digests) for agent in table.agents.values()]
        for name, text, value in (
            ("most_adapters", "Adapters at the agent with most adapters.", max(numbers, default=0)),
            ("adapters_per_agent", "Adapters divided by agents.", len(set(copies)) / max(1, len(numbers))),
            ("engines", "Engines that get requests.", len(self._members.open_engines())),
            ("gateways", "Connected gateways.", len(table.subscribers)),
            (
                "placement_moved_bytes",
                "Bytes moved by the last step of the placement.",
                self._placing.moved_bytes,
            ),
            ("placement_step_seconds", "Time to plan the last step of the placement.", self._placing.step_s),
        ):
            yield GaugeMetricFamily(f"corun_cluster_{name}", text, value)
        yield from self._fetches()

    def _fetches(self) -> Iterator[Metric]:
        """Yield counts of fetches by agent and peer."""
        for name, field, text in (
            ("fetches", "num_fetched", "Adapters fetched by an agent."),
            ("fetched_bytes", "num_bytes", "Bytes of files fetched by an agent."),
            ("fetch_seconds", "seconds", "Seconds of fetches, with checks."),
            ("fetches_lost", "num_lost", "Fetches that a peer did not complete."),
            ("fetches_wrong", "num_wrong", "Fetches with content that did not match the digest."),
        ):
            family = GaugeMetricFamily(f"corun_cluster_{name}", text, labels=["agent", "peer"])
            for report in self._members.reports.values():
                for peer, fetches in report.fetches.items():
                    family.add_metric([report.agent_id, peer], getattr(fetches, field))
            yield family


def exposition(table: RoutingTable, pool: CopyPool, members: Members, placing: Placing) -> bytes:
    """Return the text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Collector(table, pool, members, placing))
    return generate_latest(registry)
