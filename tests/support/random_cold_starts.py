"""Cold starts without a planner: any decision that the scheduler must live with."""

import random

from corun.runtime.memory.transfers import TransferTable
from corun.runtime.plan import StepId, TransferId
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk, ColdStarts, StepRows

NUM_LAYERS = 4


class RandomColdStarts(ColdStarts):
    """Starts cold requests and cuts chunks at random; checks the calls that it gets."""

    file_bytes_per_s = 1e6

    def __init__(
        self, rng: random.Random, transfers: TransferTable, *, start_share: float, blocking_share: float
    ) -> None:
        self._rng = rng
        self._transfers = transfers
        self._start_share = start_share
        self._blocking_share = blocking_share
        self._is_blocking: dict[TransferId, bool] = {}  # decided when it is first seen
        self.num_started = 0

    def files_read(self, num_bytes: int, duration_s: float) -> None:
        assert num_bytes >= 0 and duration_s >= 0.0

    def may_start(self, request: Request, num_others: int, rows: StepRows, now_s: float) -> bool:
        is_loading = self._transfers.load_of(request.adapter_id) is not None
        may = is_loading and self._rng.random() < self._start_share
        self.num_started += may
        return may

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        assert request.is_cold
        is_loading = self._transfers.load_of(request.adapter_id) is not None
        if not is_loading or self._rng.random() < 0.2:
            return None
        num_tokens = self._rng.randint(1, min(max_tokens, request.num_pending_tokens))
        return ColdChunk(num_tokens, self._rng.randint(0, NUM_LAYERS))

    def step_closed(self, step_id: StepId, rows: StepRows, now_s: float) -> None:
        assert sum(chunk.num_tokens for _, chunk in rows.cold_chunks) <= rows.max_cold_tokens

    def blocks_all_requests(self) -> bool:
        under_way = [transfer.transfer_id for transfer in self._transfers]
        for transfer_id in under_way:
            if transfer_id not in self._is_blocking:
                self._is_blocking[transfer_id] = self._rng.random() < self._blocking_share
        return any(self._is_blocking[transfer_id] for transfer_id in under_way)
