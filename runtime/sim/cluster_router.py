"""A router among simulated servers: what it sees of them, and what it has learned of outputs."""

import random
from collections.abc import Mapping, Sequence

from ...profiles.step_time import forward_s
from ..cluster.policy.registry import RouterFacts, make_router
from ..cluster.policy.reports import RouteRequest, ServerCosts, ServerId, ServerReport, Shares
from ..cluster.policy.router import Move, Router
from ..cluster.policy.views import ServerView
from ..scheduler.predictor import OutputHistory
from .cluster_spec import ClusterSpec
from .machines import SimulatedMachine

_SLO_FACTOR = 1.5  # Toppings, section 7.4: of the time per token without adapters


class RouterSeat:
    """One router, which knows of servers only what they have reported and what it sent them."""

    def __init__(self, router: Router, costs: ServerCosts, rng: random.Random) -> None:
        self._router = router
        self._costs = costs
        self._rng = rng
        self._views: dict[ServerId, ServerView] = {}
        self._servers: list[ServerView] = []  # by id
        self._outputs = OutputHistory[str | None]()

    @property
    def may_move(self) -> bool:
        """Whether it ever moves what waits."""
        return type(self._router).moves is not Router.moves

    def joined(self, server_id: ServerId, report: ServerReport) -> None:
        """A server may be sent requests from now on."""
        self._views[server_id] = ServerView(server_id, self._costs, report)
        self._list()

    def left(self, server_id: ServerId) -> None:
        """It may not any more. Unknown ones have left."""
        if self._views.pop(server_id, None) is not None:
            self._list()

    def told(self, server_id: ServerId, report: ServerReport) -> None:
        """A report has come; nobody reads that of a server that has left."""
        view = self._views.get(server_id)
        if view is not None:
            view.tell(report)

    def placed(self, shares: Shares) -> None:
        """See ``Router.on_placed``."""
        self._router.on_placed(shares)

    def rank(self, request: RouteRequest, now_s: float) -> Sequence[ServerId]:
        """Servers, best first."""
        return self._router.rank(request, self._servers, now_s, self._rng)

    def sends(self, request: RouteRequest, server_id: ServerId, now_s: float) -> None:
        """It sends a request there."""
        self._views[server_id].assign(request, now_s)
        self._router.on_assigned(request, server_id)

    def moves(self, waiting: Mapping[ServerId, Sequence[RouteRequest]]) -> Sequence[Move]:
        """Those of its requests that it wants elsewhere."""
        return self._router.moves(waiting, self._servers)

    def predicted_tokens(self, adapter: str | None) -> int:
        """Of a request's output: as its adapter's before."""
        return self._outputs.predict(adapter)

    def ended(self, adapter: str | None, num_tokens: int) -> None:
        """One of its requests has put out so many tokens."""
        self._outputs.ended(adapter, num_tokens)

    def _list(self) -> None:
        self._servers = [self._views[server_id] for server_id in sorted(self._views)]


def seats_of(machine: SimulatedMachine, spec: ClusterSpec) -> list[RouterSeat]:
    """The routers before servers. Raises ``ConfigError`` if there is none of that name."""
    slo_tpot_s = spec.slo_tpot_s or default_slo_tpot_s(machine)
    facts = RouterFacts(num_routers=spec.num_routers, slo_tpot_s=slo_tpot_s)
    costs, router = costs_of(machine, spec.peer_bytes_per_s), spec.router
    return [
        RouterSeat(
            make_router(router, facts) if isinstance(router, str) else router(facts),
            costs,
            random.Random(f"{spec.seed} {number}"),  # noqa: S311 - a simulation
        )
        for number in range(spec.num_routers)
    ]


def default_slo_tpot_s(machine: SimulatedMachine) -> float:
    """1.5 times a step of a full batch without adapters, with as much context as memory holds."""
    rows = machine.max_num_seqs
    context = machine.num_blocks * machine.block_size // rows
    step_s = forward_s(machine.model, (1,) * rows, (context,) * rows, (0,) * rows)
    return _SLO_FACTOR * step_s


def costs_of(machine: SimulatedMachine, peer_bytes_per_s: float) -> ServerCosts:
    """What routers know of a server that is such a machine."""
    return ServerCosts(
        model=machine.model,
        max_num_batched_tokens=machine.max_num_batched_tokens,
        block_size=machine.block_size,
        max_num_seqs=machine.max_num_seqs,
        adapter_bytes_per_rank=machine.adapter_bytes_per_rank,
        file_bytes_per_s=machine.file_bytes_per_s,
        peer_bytes_per_s=peer_bytes_per_s,
        mix_decode_with_prefill=machine.mix_decode_with_prefill,
    )
