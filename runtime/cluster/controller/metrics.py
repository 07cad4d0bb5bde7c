"""What the controller's ``/metrics`` shows: copies, fetches, and what placement has moved."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from ...server.adapter_metrics import MAX_ADAPTER_SERIES, OTHER
from .members import Members
from .placing import Placing
from .pool import CopyPool
from .table import RoutingTable


class _Collector:
    """Reads the parts when it is asked."""

    def __init__(
        self, table: RoutingTable, pool: CopyPool, members: Members, placing: Placing
    ) -> None:
        self._table = table
        self._pool = pool
        self._members = members
        self._placing = placing

    def collect(self) -> Iterator[Metric]:
        """Yield what there is now."""
        table, copies = self._table, self._pool.num_copies()
        by_name = Counter[str]()
        for number, entry in enumerate(table.adapters.values()):
            name = entry.name if number < MAX_ADAPTER_SERIES else OTHER
            by_name[name] += copies.get(entry.digest, 0)
        family = GaugeMetricFamily(
            "corun_cluster_adapter_copies", "Copies of an adapter's files, by adapter.",
            labels=["adapter_name"],
        )  # fmt: skip
        for name, number in by_name.items():
            family.add_metric([name], number)
        yield family
        numbers = [len(agent.digests) for agent in table.agents.values()]
        for name, text, value in (
            ("most_adapters", "Adapters at the agent that has most.", max(numbers, default=0)),
            (
                "adapters_per_agent", "Adapters over agents: what each has if none is copied.",
                len(set(copies)) / max(1, len(numbers)),
            ),
            ("engines", "Engines that get requests.", len(self._members.open_engines())),
            ("gateways", "Gateways that listen.", len(table.subscribers)),
            ("placement_moved_bytes", "Bytes moved by the last step of the placement.",
             self._placing.moved_bytes),
            ("placement_step_seconds", "Time to plan the last step of the placement.",
             self._placing.step_s),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"corun_cluster_{name}", text, value)
        yield from self._fetches()

    def _fetches(self) -> Iterator[Metric]:
        """By agent, and where it took files from."""
        for name, field, text in (
            ("fetches", "num_fetched", "Adapters fetched by an agent."),
            ("fetched_bytes", "num_bytes", "Bytes of their files."),
            ("fetch_seconds", "seconds", "Time that took, checks included."),
            ("fetches_lost", "num_lost", "Fetches that a peer did not end."),
            ("fetches_wrong", "num_wrong", "Fetches of other content than the digest names."),
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
