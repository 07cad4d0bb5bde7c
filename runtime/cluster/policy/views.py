"""Servers as one router sees them: the last report of each, and what this router sent it since."""

from collections.abc import Callable
from functools import cached_property

from .load import ServerLoad, load_of
from .reports import RouteRequest, ServerCosts, ServerId, ServerReport

# Where the nearest copy of an adapter is, of one server. Plain numbers, which index arrays fast.
ON_GPU = 0
IN_HOST = 1  # or on its way to the device: how much is left is not known
ON_DISK = 2
ELSEWHERE = 3


class ServerView:
    """One server. What every request's score needs of it is computed once, when it changes.

    What was sent is kept until a report has it: a server that reports no more is to be left out.
    """

    report: ServerReport
    tiers: dict[str, int]  # of all adapters that are not elsewhere

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
        """What it has to do; another object after each change. O(ranks + sent) then."""
        return load_of(self.costs, self.report, tuple(self._sent.values()))

    def with_costs(self, costs: ServerCosts) -> "ServerView":
        """Return the same with other costs; routers compare views by identity."""
        view = ServerView(self.server_id, costs, self.report)
        view._num_sent = self._num_sent
        view._sent = dict(self._sent)
        view.apply(self.report, lambda _: True)
        return view

    def apply(self, report: ServerReport, lacks: Callable[[int], bool] | None = None) -> None:
        """Take its new report. O(its adapters + sent).

        ``lacks``: which requests, by number, the report does not have in it; None = those that
        were sent after the report was made.
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
        """Adapters with files, cached until they change, since there may be a thousand."""
        sets = report.disk_adapters, report.host_adapters
        if sets[0] is not self._sets[0] or sets[1] is not self._sets[1]:
            self._sets = sets
            self._tiers_below = dict.fromkeys(sets[0], ON_DISK) | dict.fromkeys(sets[1], IN_HOST)
        return self._tiers_below

    def assign(self, request: RouteRequest, now_s: float) -> int:
        """This router sends it a request, which its next report may or may not have in it.

        Returns the request's number here.
        """
        self._num_sent += 1
        self._sent[self._num_sent] = now_s, request
        self._changed()
        self._expect(request)
        return self._num_sent

    def withdraw(self, number: int) -> None:
        """A request that was sent is not there (any more); which, ``assign`` has said."""
        if self._sent.pop(number, None) is not None:
            self._changed()

    def _changed(self) -> None:
        self.__dict__.pop("load", None)

    def _expect(self, request: RouteRequest) -> None:
        """Its adapter will be on the way to the device."""
        name = request.adapter_name
        if name is not None and self.tiers.get(name) != ON_GPU:
            self.tiers[name] = IN_HOST
