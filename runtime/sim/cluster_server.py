"""One of many simulated servers: an unchanged engine with the time of its next event; reports."""

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...profiles.link import Direction
from ..cluster.policy.reports import RouteRequest, ServerId, ServerReport
from ..engine.messages import EngineStats
from ..engine.stats import OpenWork
from ..errors import RequestError
from ..plan import AdapterId, AdapterTransfer
from ..request import RequestStatus
from ..scheduler.events import RequestUpdate
from .clock import VirtualClock
from .engine import SimulatedParts, SimulationOptions, build_simulated_parts, request_of
from .machines import SimulatedMachine
from .replay import Replayed, RequestRecord
from .workloads import Workload


@dataclass(slots=True, eq=False)
class Sent:
    """A request and the server that it was sent to last."""

    route: RouteRequest
    record: RequestRecord
    router: int  # that received it
    num_sends: int = 0
    engine_id: int = 0  # its id in that server's engine: a new one each time it is sent
    server: "ClusterServer | None" = None
    needs_file: bool = False  # waits for its adapter's file


class Due(enum.IntEnum):
    """Order of events that are due at the same time."""

    RESULT = 0  # of a server's step or load
    COPY = 1
    CHANGE = 2  # a server joins, leaves or dies
    ARRIVAL = 3
    TURN = 4  # a server's engine may plan
    DELIVERY = 5
    REPORT = 6
    MOVES = 7
    PLACEMENT = 8
    LOOK = 9


class ClusterServer:
    """An engine of a cluster, polled when an event is due; it never sleeps."""

    def __init__(
        self,
        index: int,
        machine: SimulatedMachine,
        workload: Workload,
        options: SimulationOptions,
        clock: VirtualClock,
    ) -> None:
        """Raises ``ConfigError`` if there is no such policy."""
        self.index = index
        self.server_id = ServerId(f"server-{index:03d}")
        self.is_open = False  # for new requests
        self.num_routed = 0  # requests sent here since the start
        self.has_changed = True  # since the last report
        self._machine = machine
        self._workload = workload
        self._slowness = options.factors.step
        self._clock = clock
        self._parts: SimulatedParts = build_simulated_parts(
            machine, workload, options, clock=clock, sleep=clock.sleep
        )
        self._keeps_all_in_host = options.host_bytes is None
        self._sent: dict[int, Sent] = {}  # open requests, by their ids in the engine
        self._on_host: set[str] = set()
        self._done: Replayed | None = None

    @property
    def has_work(self) -> bool:
        """Whether its engine has something to do, or waits for files."""
        return self._done is None and bool(self._parts.core.has_work or self._sent)

    @property
    def num_requests(self) -> int:
        """Open requests, including those that wait for files."""
        return len(self._sent)

    @property
    def sent(self) -> Iterable[Sent]:
        """Open requests, by arrival."""
        return self._sent.values()

    def stats(self) -> EngineStats:
        return self._parts.core.stats()

    def next_due(self) -> tuple[float, Due]:
        """Time and kind of its next event; inf = only an event from outside wakes it."""
        core = self._parts.core
        if self._done is not None or not core.has_work:
            return math.inf, Due.TURN
        if core.is_ready:
            return self._clock(), Due.TURN
        wake_at_s, result_at_s = core.wake_at_s(), self._parts.executor.result_at_s
        if wake_at_s is not None and wake_at_s < result_at_s:
            return wake_at_s, Due.TURN
        return result_at_s, Due.RESULT

    def accept(self, sent: Sent, *, needs_file: bool) -> None:
        """Accept a request; call ``add`` once its file is there."""
        sent.num_sends += 1
        number = len(self._workload.requests)
        sent.engine_id = sent.record.request_id + (sent.num_sends - 1) * number
        sent.server, sent.needs_file = self, needs_file
        self._sent[sent.engine_id] = sent
        self.num_routed += 1
        self.has_changed = True

    def add(self, sent: Sent, *, is_late: bool) -> None:
        """Give an accepted request to the engine; ``is_late``: it arrived before now.

        Raises ``RequestError``, and drops the request, if it can never be served.
        """
        sent.needs_file = False
        arrival_s = sent.record.arrival_s if is_late else None
        try:
            self._parts.core.add_request(request_of(self._workload, sent.engine_id), arrival_s)
        except RequestError:
            del self._sent[sent.engine_id]
            raise

    def take_back(self, sent: Sent) -> None:
        """Abort a request that moves to another server; its further updates are ignored."""
        del self._sent[sent.engine_id]
        if not sent.needs_file:
            self._parts.core.abort((sent.engine_id,))
        self.has_changed = True

    def evict(self, adapter: str) -> None:
        """Unload an adapter that no request uses, after its files were dropped."""
        self._parts.core.evict_adapter(adapter)
        self.has_changed = True

    def turn(self) -> Iterator[tuple[Sent, RequestUpdate]]:
        """Let the engine take a step, and yield updates of requests."""
        self.has_changed = True
        for update in self._parts.core.step(0.0):
            sent = self._sent.get(update.request_id)
            if sent is None:
                continue
            if update.finish_reason is not None:
                del self._sent[update.request_id]
            yield sent, update

    def waiting(self) -> list[Sent]:
        """Requests without a token that hold no memory, by arrival."""
        held = {
            request.request_id
            for request in self._parts.scheduler.requests
            if request.status is not RequestStatus.WAITING or request.num_output_tokens
        }
        return [sent for engine_id, sent in self._sent.items() if engine_id not in held]

    def report(self, reported_s: float, files: frozenset[str]) -> ServerReport:
        """The report for routers; ``files``: adapters in its store. O(running + adapters)."""
        self.has_changed = False
        memory, block_size = self._parts.scheduler.memory, self._machine.block_size
        work = OpenWork(self._parts.scheduler)
        for one in self._sent.values():
            if one.needs_file:
                work.wait(one.route.rank, one.route.num_prompt_tokens)
        loading = (one.command for one in memory.transfers)
        return ServerReport(
            reported_s=reported_s,
            is_ready=self.is_open,
            num_running_by_rank=work.num_running_by_rank,
            num_waiting_by_rank=work.num_waiting_by_rank,
            queued_prefill_tokens=work.queued_tokens,
            running_context_tokens=work.context_tokens,
            free_kv_tokens=memory.num_free_blocks * block_size,
            total_kv_tokens=memory.num_blocks * block_size,
            gpu_adapters=frozenset(map(self._name_of, memory.cache.resident_ids())),
            host_adapters=files if self._keeps_all_in_host else self._names_on_host(),
            disk_adapters=files,
            loading_adapters=frozenset(
                self._name_of(one.adapter_id) for one in loading if isinstance(one, AdapterTransfer)
            ),
            # The whole step is slower by this factor, so a server that computes measures it.
            measured_over_predicted=self._slowness if self._num_steps else 1.0,
        )

    def close(self) -> list[Sent]:
        """Close the engine; return the open requests."""
        if self._done is None:
            executor = self._parts.executor
            link = {one.value: executor.link_stats(one) for one in Direction}
            self._done = Replayed((), {}, self.stats(), link, executor.step_stats(), self._clock())
            executor.close()
        self.is_open = False
        open_requests = list(self._sent.values())
        self._sent.clear()
        return open_requests

    def result(self, records: Sequence[RequestRecord], refused: Mapping[str, int]) -> Replayed:
        """Results of the closed server, with the requests that were last sent here."""
        assert self._done is not None, "it is still open"
        return replace(self._done, records=tuple(records), refused=dict(sorted(refused.items())))

    @property
    def _num_steps(self) -> int:
        return self._parts.executor.step_stats().num_steps

    def _name_of(self, adapter_id: AdapterId) -> str:
        return self._parts.registry.version(adapter_id).name

    def _names_on_host(self) -> frozenset[str]:
        """Adapters in the host's memory; here contents have the names of their adapters."""
        host = self._parts.scheduler.memory.host
        assert host is not None
        for digest in host.changed:
            (self._on_host.add if host.contains(digest) else self._on_host.discard)(digest)
        host.changed.clear()
        return frozenset(self._on_host)
