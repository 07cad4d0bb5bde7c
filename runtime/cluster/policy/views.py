"""Servers as one router sees them: the last report of each, and what this router sent it since."""

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

    __slots__ = ("_sent", "_sets", "_tiers_below", "costs", "load", "report", "server_id", "tiers")

    report: ServerReport
    load: ServerLoad[float]  # another object after each change
    tiers: dict[str, int]  # of all adapters that are not elsewhere

    def __init__(self, server_id: ServerId, costs: ServerCosts, report: ServerReport) -> None:
        self.server_id = server_id
        self.costs = costs
        self._sent: list[tuple[float, RouteRequest]] = []
        self._sets: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._tiers_below: dict[str, int] = {}
        self.tell(report)

    def tell(self, report: ServerReport) -> None:
        """Take its new report, which has in it what was sent until then. O(its adapters)."""
        self.report = report
        self._sent = [(sent_s, request) for sent_s, request in self._sent if sent_s > report.told_s]
        self.load = load_of(self.costs, report, self._sent)
        self.tiers = dict(self._below_gpu(report))
        self.tiers.update(dict.fromkeys(report.loading_adapters, IN_HOST))
        self.tiers.update(dict.fromkeys(report.gpu_adapters, ON_GPU))
        for _, request in self._sent:
            self._expect(request)

    def _below_gpu(self, report: ServerReport) -> dict[str, int]:
        """Those with files: made anew only when they are others, since there may be a thousand."""
        sets = report.disk_adapters, report.host_adapters
        if sets[0] is not self._sets[0] or sets[1] is not self._sets[1]:
            self._sets = sets
            self._tiers_below = dict.fromkeys(sets[0], ON_DISK) | dict.fromkeys(sets[1], IN_HOST)
        return self._tiers_below

    def assign(self, request: RouteRequest, now_s: float) -> None:
        """This router sends it a request, which its next report may or may not have in it."""
        self._sent.append((now_s, request))
        self.load = load_of(self.costs, self.report, self._sent)
        self._expect(request)

    def _expect(self, request: RouteRequest) -> None:
        """Its adapter will be on the way to the device."""
        name = request.adapter_name
        if name is not None and self.tiers.get(name) != ON_GPU:
            self.tiers[name] = IN_HOST
