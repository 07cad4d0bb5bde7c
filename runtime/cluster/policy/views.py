"""A router's views of servers: the last report of each, and the requests sent since."""

from collections.abc import Callable
from functools import cached_property

from .load import ServerLoad, load_of
from .reports import RouteRequest, ServerCosts, ServerId, ServerReport

# The nearest copy of an adapter, as seen by one server. Integers, to index arrays.
ON_GPU = 0
IN_HOST = 1  # or being loaded to the device; the progress is unknown
ON_DISK = 2
ELSEWHERE = 3


class ServerView:
    """A view of one server. Inputs of scores are computed once per change.

    Sent requests are kept until a report includes them, so remove a server that stops reporting.
    """

    report: ServerReport
    tiers: dict[str, int]  # of all adapters that have a copy at the server

    def __init__(self, server_id: ServerId, costs: ServerCosts, report: ServerReport) -> None:
        self.server_id = server_id
        self.costs = costs
        self._num_sent = 0
        self._sent: dict[int, tuple[float, RouteRequest]] = {}  # by number, from 1 on
        self._sets: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._tiers_below: dict[str, int] = {}
        self.apply(report)

    @cached_property
    def load(self) -> ServerLoad[float]:
        """The server's load; a new object after each change. O(ranks + sent) per change."""
        return load_of(self.costs, self.report, tuple(self._sent.values()))

    def with_costs(self, costs: ServerCosts) -> "ServerView":
        """Return a new view with other costs; routers compare views by identity."""
        view = ServerView(self.server_id, costs, self.report)
        view._num_sent = self._num_sent
        view._sent = dict(self._sent)
        view.apply(self.report, lambda _: True)
        return view

    def apply(self, report: ServerReport, lacks: Callable[[int], bool] | None = None) -> None:
        """Apply a report. O(adapters + sent).

        ``lacks``: whether the report does not include a request, by number; None = it includes
        those sent before it was made.
        """
        self.report = report
        self._sent = {
            number: (sent_s, request)
            for number, (sent_s, request) in self._sent.items()
            if (sent_s > report.reported_s if lacks is None else lacks(number))
        }
        self._changed()
        self.tiers = dict(self._below_gpu(report))
        self.tiers.update(dict.fromkeys(report.loading_adapters, IN_HOST))
        self.tiers.update(dict.fromkeys(report.gpu_adapters, ON_GPU))
        for _, request in self._sent.values():
            self._expect(request)

    def _below_gpu(self, report: ServerReport) -> dict[str, int]:
        """Return tiers of adapters not on the device, cached: there may be a thousand."""
        sets = report.disk_adapters, report.host_adapters
        if sets[0] is not self._sets[0] or sets[1] is not self._sets[1]:
            self._sets = sets
            self._tiers_below = dict.fromkeys(sets[0], ON_DISK) | dict.fromkeys(sets[1], IN_HOST)
        return self._tiers_below

    def assign(self, request: RouteRequest, now_s: float) -> int:
        """Add a sent request, which the next report may or may not include.

        Returns the request's number at this server.
        """
        self._num_sent += 1
        self._sent[self._num_sent] = now_s, request
        self._changed()
        self._expect(request)
        return self._num_sent

    def withdraw(self, number: int) -> None:
        """Remove a sent request; ``number``: from ``assign``."""
        if self._sent.pop(number, None) is not None:
            self._changed()

    def _changed(self) -> None:
        self.__dict__.pop("load", None)

    def _expect(self, request: RouteRequest) -> None:
        """Count the request's adapter as being loaded."""
        name = request.adapter_name
        if name is not None and self.tiers.get(name) != ON_GPU:
            self.tiers[name] = IN_HOST
