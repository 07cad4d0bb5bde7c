"""Many servers behind routers, on one virtual clock.

Every server is an unchanged ``EngineCore``. None sleeps: the cluster advances to the earliest event
of all servers, file copies, arrivals and reports, and polls the servers concerned. Runs are
deterministic: routers draw from seeded generators, and ties are broken by server index.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush

from ..cluster.demand import PlacementSteps, names_at
from ..cluster.policy.placement.capacity_table import CapacityTable
from ..cluster.policy.placement.plan import PlacementPolicy, StoreServer
from ..cluster.policy.placement.registry import PlacementFacts, make_placement
from ..cluster.policy.registry import RouterFacts, default_slo_tpot_s, make_router
from ..cluster.policy.reports import RouteRequest, ServerCosts, ServerId, ServerReport, Shares
from ..cluster.router_state import RouterState
from ..errors import RequestError
from ..machine.gc_control import collection_paused
from .clock import VirtualClock
from .cluster_log import ClusterReplayed
from .cluster_server import ClusterServer, Due, Sent
from .cluster_spec import ClusterSpec
from .engine import SimulationOptions, adapter_name
from .file_stores import StoreUse, filled_stores
from .machines import SimulatedMachine
from .replay import RequestRecord
from .workloads import Workload

_MOVES_EVERY_S = 1.0  # by hand: interval at which routers may move waiting requests

# Called periodically with the seconds from the start and all servers, open or not.
LookAtServers = Callable[[float, Sequence[ClusterServer]], None]


Action = Callable[[], None]


class SimulatedPlacement:
    """Placement steps over a fixed set of adapters."""

    def __init__(
        self,
        policy: PlacementPolicy,
        ranks: Mapping[str, int],
        bytes_per_rank: int,
        tokens_per_s: Mapping[str, float],
        *,
        store_bytes: int,
        every_s: float,
    ) -> None:
        """``tokens_per_s``: expected demand before the first request."""
        self.every_s = every_s
        self._ranks = ranks
        self._bytes_per_rank = bytes_per_rank
        self._store_bytes = store_bytes
        self._steps = PlacementSteps(policy)
        self._steps.expect({name: (tokens_per_s[name], 0.0) for name in ranks})
        self.record = self._steps.record
        self._has_begun = False

    def step(self, server_ids: Sequence[ServerId]) -> Shares:
        """Plan the next step for these servers, from the demand of the last step.

        Raises ``ConfigError`` if there is no room for all adapters.
        """
        if self._has_begun:
            self._steps.end_step(self.every_s)
        self._has_begun = True
        demand = [
            self._steps.demand_of(name, rank, rank * self._bytes_per_rank)
            for name, rank in self._ranks.items()
        ]
        servers = [StoreServer(server_id, self._store_bytes) for server_id in server_ids]
        return self._steps.plan(demand, servers)


def placement_of(
    machine: SimulatedMachine, workload: Workload, spec: ClusterSpec
) -> SimulatedPlacement | None:
    """The cluster's placement, which expects each adapter's mean demand in ``workload``.

    None if the cluster has none. Raises ``ConfigError`` if there is none of that name.
    """
    if spec.placement is None:
        return None
    tokens = Counter[int]()
    for one in workload.requests:
        tokens[one.adapter] += one.prompt_tokens + one.output_tokens
    duration_s = max(workload.requests[-1].arrival_s, spec.placement_every_s)
    capacity = CapacityTable(dict(spec.capacity)) if spec.capacity else None
    facts = PlacementFacts(capacity=capacity, seed=spec.seed)
    return SimulatedPlacement(
        make_placement(spec.placement, facts),
        {adapter_name(adapter): rank for adapter, rank in enumerate(workload.ranks)},
        machine.adapter_bytes_per_rank,
        {adapter_name(adapter): tokens[adapter] / duration_s for adapter in range(len(workload.ranks))},
        store_bytes=spec.store_bytes or sum(workload.ranks) * machine.adapter_bytes_per_rank,
        every_s=spec.placement_every_s,
    )


class Agenda:
    """Actions by time; ties are broken by order, then by index, then by insertion."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, int]] = []
        self._actions: dict[int, Action] = {}  # by serial number; cancelled ones are removed
        self._serials = itertools.count()
        self._expected: dict[tuple[str, int], int] = {}  # serial numbers; may have been taken

    def add(self, at_s: float, order: int, index: int, action: Action) -> int:
        """Schedule ``action`` at ``at_s``; return its serial number."""
        serial = next(self._serials)
        heappush(self._heap, (at_s, order, index, serial))
        self._actions[serial] = action
        return serial

    def expect(self, kind: str, index: int, due: tuple[float, int], action: Action) -> None:
        """Replace the action of this kind and index; ``due``: its time and order.

        A time of inf cancels it.
        """
        self._actions.pop(self._expected.pop((kind, index), -1), None)
        if due[0] < math.inf:
            self._expected[kind, index] = self.add(*due, index, action)

    def take(self) -> tuple[float, int, Action] | None:
        """Return the earliest action, with its time and order; None if there is none."""
        while self._heap:
            at_s, order, _, serial = heappop(self._heap)
            action = self._actions.pop(serial, None)
            if action is not None:
                return at_s, order, action
        return None


def router_states_of(machine: SimulatedMachine, spec: ClusterSpec) -> list[RouterState]:
    """The routers of ``spec``. Raises ``ConfigError`` if there is no such router."""
    slo_tpot_s = spec.slo_tpot_s or default_slo_tpot_s(
        machine.model, machine.max_num_seqs, machine.num_blocks * machine.block_size
    )
    facts = RouterFacts(num_routers=spec.num_routers, slo_tpot_s=slo_tpot_s)
    router = spec.router
    return [
        RouterState(
            make_router(router, facts) if isinstance(router, str) else router(facts),
            random.Random(f"{spec.seed} {number}"),  # noqa: S311 - a simulation
        )
        for number in range(spec.num_routers)
    ]


def costs_of(machine: SimulatedMachine, peer_bytes_per_s: float) -> ServerCosts:
    """Costs of a server that simulates ``machine``, as routers know them."""
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


def replay_cluster(
    machine: SimulatedMachine,
    workload: Workload,
    options: SimulationOptions,
    spec: ClusterSpec,
    *,
    horizon_s: float = math.inf,
    look: LookAtServers | None = None,
    look_every_s: float = 1.0,
) -> ClusterReplayed:
    """Route the requests of ``workload`` to servers that simulate ``machine``.

    Args:
        machine: The machine of every server, before its factors.
        workload: The requests; they go to the routers in turn.
        options: Of every engine; their factors are ignored.
        spec: The servers and routers.
        horizon_s: The run is cut this long after the last arrival.
        look: An observer.
        look_every_s: How often ``look`` is called.

    Raises:
        ConfigError: There is no such policy or router, or stores are too small.
        EngineDeadError: No request makes progress.
    """
    cluster = _Cluster(machine, workload, options, spec)
    if look is not None:
        cluster.watch(look, look_every_s)
    end_s = workload.requests[-1].arrival_s if workload.requests else 0.0
    with collection_paused():  # there are many live objects, and no cyclic garbage
        cluster.run(end_s + horizon_s)
    return cluster.result()


class _Cluster:
    """A running replay."""

    def __init__(
        self, machine: SimulatedMachine, workload: Workload, options: SimulationOptions, spec: ClusterSpec
    ) -> None:
        self._machine = machine
        self._workload = workload
        self._spec = spec
        self._clock = VirtualClock()
        self._agenda = Agenda()
        self._servers = [
            ClusterServer(index, machine, workload, replace(options, factors=life.factors), self._clock)
            for index, life in enumerate(spec.servers)
        ]
        self._by_id = {server.server_id: server for server in self._servers}
        self._stores = filled_stores(
            {
                adapter_name(adapter): rank * machine.adapter_bytes_per_rank
                for adapter, rank in enumerate(workload.ranks)
            },
            len(spec.servers),
            [index for index, life in enumerate(spec.servers) if life.joins_s <= 0.0],
            spec.store_bytes,
            spec.peer_bytes_per_s,
        )
        self._placement = placement_of(machine, workload, spec)
        self._costs = costs_of(machine, spec.peer_bytes_per_s)
        self._router_states = router_states_of(machine, spec)
        self._sent: dict[int, Sent] = {}  # all requests that have arrived, but for refused ones
        self._num_arrived = 0
        self._unrouted: list[Sent] = []  # no server could accept them
        self._refused = [Counter[str]() for _ in self._servers]
        self._gone: dict[int, StoreUse] = {}  # by server
        self._leaving: dict[int, ClusterServer] = {}
        self._num_joins_to_come = 0
        self._num_moved = self._num_lost = 0
        self._begin()

    def watch(self, look: LookAtServers, every_s: float) -> None:
        """Call ``look`` every ``every_s`` seconds."""
        self._every(every_s, 0.0, Due.LOOK, 0, lambda: look(self._clock(), self._servers))

    def run(self, end_s: float) -> None:
        """Run until all requests have ended, or to ``end_s``."""
        while not self._is_over() and (due := self._agenda.take()) is not None:
            at_s, order, action = due
            if order > Due.TURN and at_s >= end_s:  # the cut is at a server's own time
                continue
            self._clock.sleep_until(at_s)
            action()
            if self._clock() >= end_s:
                break

    def result(self) -> ClusterReplayed:
        """Close all servers and return the results."""
        for server in self._servers:
            server.close()
            if server.index not in self._gone:
                self._gone[server.index] = self._stores.close(server.index)
        records: list[list[RequestRecord]] = [[] for _ in self._servers]
        for sent in self._sent.values():
            if sent.server is not None:
                records[sent.server.index].append(sent.record)
        return ClusterReplayed(
            records=tuple(sent.record for sent in self._sent.values()),
            refused=dict(sorted(sum(self._refused, Counter[str]()).items())),
            servers=tuple(
                server.result(records[server.index], self._refused[server.index]) for server in self._servers
            ),
            num_routed=tuple(server.num_routed for server in self._servers),
            stores=tuple(self._gone[server.index] for server in self._servers),
            num_moved=self._num_moved,
            num_lost=self._num_lost,
            duration_s=self._clock(),
        )

    def _begin(self) -> None:
        """Schedule all events that are known at the start."""
        spec, agenda = self._spec, self._agenda
        for server, life in zip(self._servers, spec.servers, strict=True):
            if life.joins_s <= 0.0:
                self._join(server)
            else:
                self._num_joins_to_come += 1
                agenda.add(life.joins_s, Due.CHANGE, server.index, partial(self._join_late, server))
            for at_s, change in ((life.leaves_s, self._leave), (life.dies_s, self._die)):
                if at_s < math.inf:
                    agenda.add(at_s, Due.CHANGE, server.index, partial(change, server))
            # Staggered, so that servers do not report all at once.
            first_s = (1 + server.index / len(self._servers)) * spec.report_every_s
            report = partial(self._report, server)
            self._every(spec.report_every_s, first_s, Due.REPORT, server.index, report)
        if self._placement is not None:
            self._every(self._placement.every_s, 0.0, Due.PLACEMENT, 0, self._place)
        if any(state.may_move for state in self._router_states):
            self._every(_MOVES_EVERY_S, _MOVES_EVERY_S, Due.MOVES, 0, self._move)
        self._expect_arrival()

    def _every(self, every_s: float, at_s: float, order: Due, index: int, action: Callable[[], None]) -> None:
        def act(at_s: float) -> None:
            action()
            self._agenda.add(at_s + every_s, order, index, partial(act, at_s + every_s))

        self._agenda.add(at_s, order, index, partial(act, at_s))

    def _is_over(self) -> bool:
        if self._num_arrived < len(self._workload.requests):
            return False
        if any(server.has_work for server in self._servers):
            return False
        return not (self._unrouted and self._num_joins_to_come)

    # Requests.

    def _expect_arrival(self) -> None:
        if self._num_arrived < len(self._workload.requests):
            at_s = self._workload.requests[self._num_arrived].arrival_s
            self._agenda.add(at_s, Due.ARRIVAL, 0, self._arrive)

    def _arrive(self) -> None:
        one = self._workload.requests[self._num_arrived]
        router = self._num_arrived % len(self._router_states)
        self._num_arrived += 1
        name, rank = adapter_name(one.adapter), self._workload.ranks[one.adapter]
        route = RouteRequest(
            name,
            one.prompt_tokens,
            self._router_states[router].predicted_tokens(name),
            None if one.session is None else str(one.session),
            rank,
            rank * self._machine.adapter_bytes_per_rank,
        )
        if self._placement is not None:
            self._placement.record(name, one.prompt_tokens, 0)
        sent = Sent(route, RequestRecord(self._num_arrived, one.arrival_s), router)
        self._sent[self._num_arrived] = sent
        self._expect_arrival()
        self._route(sent, is_late=False)

    def _route(self, sent: Sent, *, is_late: bool) -> None:
        """Send the request to the best server with room for its adapter's file, if there is one."""
        for server_id in self._router_states[sent.router].rank(sent.route, self._clock()):
            server = self._by_id[server_id]
            if self._can_take(server, sent):
                self._send(sent, server, is_late=is_late)
                return
        self._unrouted.append(sent)

    def _can_take(self, server: ClusterServer, sent: Sent) -> bool:
        name = sent.route.adapter_name
        return name is None or self._stores.can_take(server.index, name)

    def _send(self, sent: Sent, server: ClusterServer, *, is_late: bool) -> None:
        now_s, name = self._clock(), sent.route.adapter_name
        self._router_states[sent.router].assign(sent.route, server.server_id, now_s)
        is_there = name is None or self._stores.use(server.index, name, now_s)
        server.accept(sent, needs_file=not is_there)
        if is_there:
            self._add(sent, server, is_late=is_late)
        else:
            self._expect_copy(server)

    def _add(self, sent: Sent, server: ClusterServer, *, is_late: bool) -> None:
        try:
            server.add(sent, is_late=is_late)
        except RequestError as error:
            self._refused[server.index][error.param or type(error).__name__] += 1
            del self._sent[sent.record.request_id]
            self._let_go(server, sent)
        self._expect(server)

    def _turn(self, server: ClusterServer) -> None:
        now_s = self._clock()
        ended = []
        for sent, update in server.turn():
            sent.record.apply(update, now_s)
            if update.finish_reason is not None:
                ended.append(sent)
        self._expect(server)
        for sent in ended:
            name = sent.route.adapter_name
            self._router_states[sent.router].record_output(name, sent.record.num_output_tokens)
            if self._placement is not None and name is not None:
                self._placement.record(name, 0, sent.record.num_output_tokens)
            self._let_go(server, sent)
        if ended and server.index in self._leaving:
            self._drain(server)

    def _let_go(self, server: ClusterServer, sent: Sent) -> None:
        """Release the adapter's file of a request, which may make room for other files."""
        if sent.route.adapter_name is not None:
            self._stores.release(server.index, sent.route.adapter_name)
            self._evict_dropped()
        if self._unrouted:
            self._route_again()

    def _route_again(self) -> None:
        unrouted, self._unrouted = self._unrouted, []
        for sent in unrouted:
            self._route(sent, is_late=True)

    def _expect(self, server: ClusterServer) -> None:
        self._agenda.expect("turn", server.index, server.next_due(), partial(self._turn, server))

    def _move(self) -> None:
        """Move waiting requests as routers decide."""
        waiting = {server.server_id: server.waiting() for server in self._servers}
        for number, state in enumerate(self._router_states):
            own = {
                server_id: [one for one in found if one.router == number]
                for server_id, found in waiting.items()
            }
            by_route = {id(one.route): one for found in own.values() for one in found}
            routes = {server_id: [one.route for one in found] for server_id, found in own.items()}
            for move in state.moves(routes):
                sent, target = by_route[id(move.request)], self._by_id[move.target]
                if self._can_take(target, sent):
                    source = self._by_id[move.source]
                    source.take_back(sent)
                    self._send(sent, target, is_late=True)
                    self._let_go(source, sent)
                    self._expect(source)
                    self._num_moved += 1

    # Files.

    def _evict_dropped(self) -> None:
        """Evict adapters from engines after stores have dropped their files."""
        for index, name in self._stores.take_dropped():
            self._servers[index].evict(name)
            self._expect(self._servers[index])

    def _expect_copy(self, server: ClusterServer) -> None:
        """Schedule the end of a copy to ``server``, and evict adapters dropped for it."""
        self._evict_dropped()
        due = (self._stores.end_s(server.index), Due.COPY)
        self._agenda.expect("copy", server.index, due, partial(self._copied, server))

    def _copied(self, server: ClusterServer) -> None:
        name = self._stores.complete_copy(server.index, self._clock())
        server.has_changed = True
        self._expect_copy(server)
        for sent in [one for one in server.sent if one.needs_file]:
            if sent.route.adapter_name == name:
                self._add(sent, server, is_late=True)
        for leaving in list(self._leaving.values()):
            self._drain(leaving)

    def _place(self) -> None:
        """Plan adapter placement again: update routers, and start copies of files."""
        assert self._placement is not None
        there = [server for server in self._servers if server.is_open]
        if not there:
            return
        shares = self._placement.step([server.server_id for server in there])
        for state in self._router_states:
            state.set_shares(shares)
        names = names_at(shares)
        for server in there:
            self._stores.follow(server.index, names[server.server_id], self._clock())
            self._expect_copy(server)

    # Servers.

    def _report(self, server: ClusterServer) -> None:
        if not server.is_open or not (server.has_changed or server.has_work):
            return
        report = server.report(self._clock(), self._stores.names_on(server.index))
        tell = partial(self._tell, server, report)
        if self._spec.state_age_s:
            at_s = self._clock() + self._spec.state_age_s
            self._agenda.add(at_s, Due.DELIVERY, server.index, tell)
        else:
            tell()

    def _tell(self, server: ClusterServer, report: ServerReport) -> None:
        for state in self._router_states:
            state.apply_report(server.server_id, report)

    def _join(self, server: ClusterServer) -> None:
        server.is_open = True
        report = server.report(self._clock(), self._stores.names_on(server.index))
        for state in self._router_states:
            state.add_server(server.server_id, self._costs, report)

    def _join_late(self, server: ClusterServer) -> None:
        self._num_joins_to_come -= 1
        if server.index in self._gone:
            return
        self._join(server)
        self._route_again()

    def _leave(self, server: ClusterServer) -> None:
        """Drain the server: it ends when its requests have and peers have its last copies."""
        if server.index in self._gone:
            return
        self._close_to_new(server)
        self._leaving[server.index] = server
        self._drain(server)

    def _close_to_new(self, server: ClusterServer) -> None:
        server.is_open = False
        for state in self._router_states:
            state.remove_server(server.server_id)

    def _drain(self, server: ClusterServer) -> None:
        others = [one.index for one in self._servers if one.is_open]
        self._stores.hand_over(server.index, others, self._clock())
        for index in others:
            self._expect_copy(self._servers[index])
        if not server.has_work and not self._stores.last_copies(server.index):
            self._end(server)

    def _die(self, server: ClusterServer) -> None:
        """Lose what the server has computed; routers know at once, as connections break."""
        if server.index in self._gone:
            return
        self._close_to_new(server)
        for sent in self._end(server):
            self._num_lost += 1
            sent.server = None
            sent.record = RequestRecord(sent.record.request_id, sent.record.arrival_s)
            self._route(sent, is_late=True)

    def _end(self, server: ClusterServer) -> list[Sent]:
        """Remove the server; return its open requests."""
        open_requests = server.close()
        self._leaving.pop(server.index, None)
        self._gone[server.index] = self._stores.close(server.index)
        self._expect(server)
        self._expect_copy(server)
        return open_requests
