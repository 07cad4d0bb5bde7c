"""The state that an engine reports, and the report that routers get of it. Pure."""

from ..policy.reports import ServerCosts, ServerReport
from ..wire import Accepted, EngineLoadState, EngineProfile, EngineState, PlacedAdapter

# The speed of fetches from peers is not measured: a network of 10 Gbit/s is assumed.
_PEER_BYTES_PER_S = 1e9

_NOTHING = EngineLoadState(
    num_running_by_rank={},
    num_waiting_by_rank={},
    queued_prefill_tokens=0,
    running_context_tokens=0,
    free_kv_tokens=0,
    total_kv_tokens=0,
)


class ReportedState:
    """The state that one gateway has of an engine, from a stream of incremental states."""

    def __init__(self, gateway_id: str) -> None:
        self.incarnation: str | None = None
        self.is_ready = False
        self.load = _NOTHING
        self.adapters: dict[str, PlacedAdapter] = {}
        self._gateway_id = gateway_id
        self._accepted = Accepted(last=0)
        self._on_gpu = self._in_host = self._loading = frozenset[str]()

    def apply(self, state: EngineState) -> None:
        """Apply a message of the engine. O(changes), plus O(adapters) if adapters changed."""
        self.incarnation = state.incarnation
        self.is_ready = state.is_ready
        if state.load is not None:
            self.load = state.load
        if state.accepted is not None:
            self._accepted = state.accepted.get(self._gateway_id, self._accepted)
        if state.adapters or state.removed:
            for name in state.removed:
                self.adapters.pop(name, None)
            self.adapters.update({one.name: one for one in state.adapters})
            self._sort()

    def lacks(self, number: int) -> bool:
        """Return whether the reported load does not include a request of this gateway yet."""
        accepted = self._accepted
        return number > accepted.last or number in accepted.missing

    def report(self, now_s: float, *, is_open: bool, on_disk: frozenset[str]) -> ServerReport:
        """Return the report for routers; ``on_disk``: adapters with files at the engine's agent."""
        load = self.load
        return ServerReport(
            reported_s=now_s,
            is_ready=is_open and self.is_ready,
            num_running_by_rank=load.num_running_by_rank,
            num_waiting_by_rank=load.num_waiting_by_rank,
            queued_prefill_tokens=load.queued_prefill_tokens,
            running_context_tokens=load.running_context_tokens,
            free_kv_tokens=load.free_kv_tokens,
            total_kv_tokens=load.total_kv_tokens,
            gpu_adapters=self._on_gpu,
            host_adapters=self._in_host,
            disk_adapters=on_disk,
            loading_adapters=self._loading,
            measured_over_predicted=load.measured_over_predicted,
        )

    def _sort(self) -> None:
        placed = self.adapters.values()
        self._on_gpu = frozenset(one.name for one in placed if one.level == "device")
        self._in_host = frozenset(one.name for one in placed if one.level in ("host", "partial"))
        self._loading = frozenset(one.name for one in placed if one.is_loading)


def costs_of_engine(profile: EngineProfile) -> ServerCosts:
    """Return an engine's costs, from its profile."""
    return ServerCosts(
        model=profile.machine,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
        adapter_bytes_per_rank=profile.adapter_bytes_per_rank,
        file_bytes_per_s=profile.file_bytes_per_s,
        peer_bytes_per_s=_PEER_BYTES_PER_S,
    )
