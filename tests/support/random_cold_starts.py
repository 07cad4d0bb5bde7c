"""Cold starts without a planner: any decision that the scheduler must live with."""

import random

from corun.runtime.plan import AdapterId, RequestId, StepId
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk, StepRows

NUM_LAYERS = 4


class RandomColdStarts:
    """Starts cold requests and cuts chunks at random; checks what it is told."""

    def __init__(self, rng: random.Random, *, start_share: float, blocking_share: float) -> None:
        self._rng = rng
        self._start_share = start_share
        self._blocking_share = blocking_share
        self._loading: set[AdapterId] = set()
        self._blocking: set[AdapterId] = set()
        self.num_started = 0

    def workers_changed(self, num_ready: int) -> None:
        pass

    def load_started(
        self, request: Request, now_s: float, *, is_demand: bool, is_on_host: bool
    ) -> None:
        assert request.adapter_id not in self._loading
        self._loading.add(request.adapter_id)
        if self._rng.random() < self._blocking_share:
            self._blocking.add(request.adapter_id)

    def load_promoted(self, adapter_id: AdapterId, now_s: float) -> None:
        assert adapter_id in self._loading

    def load_progressed(self, adapter_id: AdapterId, num_groups: int, now_s: float) -> None:
        assert adapter_id in self._loading

    def load_read(
        self, adapter_id: AdapterId, num_groups: int, duration_s: float, now_s: float
    ) -> None:
        assert adapter_id in self._loading

    def load_ended(self, adapter_id: AdapterId, now_s: float) -> None:
        self._loading.remove(adapter_id)
        self._blocking.discard(adapter_id)

    def may_start(self, request: Request, num_others: int, rows: StepRows, now_s: float) -> bool:
        may = request.adapter_id in self._loading and self._rng.random() < self._start_share
        self.num_started += may
        return may

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        assert request.is_cold
        if request.adapter_id not in self._loading or self._rng.random() < 0.2:
            return None
        num_tokens = self._rng.randint(1, min(max_tokens, request.num_pending_tokens))
        return ColdChunk(num_tokens, self._rng.randint(0, NUM_LAYERS))

    def step_closed(self, step_id: StepId, rows: StepRows, now_s: float) -> None:
        assert sum(chunk.num_tokens for _, chunk in rows.cold_chunks) <= rows.max_cold_tokens

    def step_ended(self, step_id: StepId, now_s: float) -> None:
        pass

    def stops_everybody(self) -> bool:
        return bool(self._blocking)

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        return None

    def counts(self) -> dict[str, int]:
        return {}

    def forget(self, request_id: RequestId) -> None:
        pass
