"""Plans for the fake executor in few words, for tests of what it lets pass."""

from collections.abc import Mapping, Sequence
from typing import Any

from corun.profiles.link import Direction
from corun.runtime.plan import (
    BASE_ADAPTER,
    AdapterId,
    AdapterTransfer,
    BlockId,
    BlockUpdate,
    HostSlot,
    KvTransfer,
    NewRequest,
    RequestId,
    StepId,
    StepPlan,
    SubBatch,
    SubBatchKind,
    TransferId,
)
from corun.runtime.sampling import SamplingParams
from support.fake_executor import FakeExecutor

PROMPT = tuple(range(10, 20))  # two full blocks of four, and half of one
OTHER_PROMPTS = [(99, *PROMPT[1:]), (*PROMPT[:7], 99, *PROMPT[8:])]
FOREIGN = "foreign, stale or missing KV"

Row = tuple[int, int, int]  # request, start, tokens


def request(request_id: int, prompt: tuple[int, ...] = PROMPT, adapter_id: int = BASE_ADAPTER) -> NewRequest:
    return NewRequest(RequestId(request_id), prompt, SamplingParams(), AdapterId(adapter_id))


class Device:
    """A fake executor, and plans for it in few words."""

    def __init__(self, **options: Any) -> None:
        settings = {"num_blocks": 16, "block_size": 4, "block_bytes": 1, "capacity_bytes": 100}
        self.executor = FakeExecutor(**settings | options, max_num_tokens=64)
        self.prompt_lens: dict[int, int] = {}
        self.num_plans = self.num_transfers = 0

    def submit(
        self,
        *rows: Row,
        new: Sequence[NewRequest] = (),
        tables: Mapping[int, tuple[int, ...]] | None = None,
        first_index: int = 0,
        **fields: Any,
    ) -> None:
        """``fields``: of the plan. Rows that reach beyond their prompt sample."""
        self.num_plans += 1
        self.prompt_lens |= {one.request_id: len(one.prompt_token_ids) for one in new}
        batch = SubBatch(
            SubBatchKind.MIXED,
            tuple(RequestId(request_id) for request_id, _, _ in rows),
            tuple(start for _, start, _ in rows),
            tuple(num_tokens for _, _, num_tokens in rows),
            tuple(start + number >= self.prompt_lens[one] for one, start, number in rows),
        )
        updates = tuple(
            BlockUpdate(RequestId(request_id), first_index, tuple(map(BlockId, block_ids)))
            for request_id, block_ids in (tables or {}).items()
        )
        self.executor.submit(StepPlan(StepId(self.num_plans), (batch,), tuple(new), updates, **fields))

    def step(self, *rows: Row, **fields: Any) -> None:
        """Submit a plan, and let the oldest step in flight end."""
        self.submit(*rows, **fields)
        self.executor.finish_step()

    def compute(self, request_id: int = 1, **options: Any) -> None:
        """Let a request compute its prompt in blocks 0 to 2."""
        new = request(request_id, **options)
        row = (request_id, 0, len(new.prompt_token_ids))
        self.step(row, new=[new], tables={request_id: (0, 1, 2)})

    def share(self, request_id: int = 2, block_ids: tuple[int, ...] = (0, 1, 3), **options: Any) -> None:
        """Let a request begin behind two blocks that others have computed."""
        new = request(request_id, **options)
        row = (request_id, 8, len(new.prompt_token_ids) - 8)
        self.step(row, new=[new], tables={request_id: block_ids})

    def end(self, request_id: int, **fields: Any) -> None:
        self.step(ended_requests=(RequestId(request_id),), **fields)

    def load(self, adapter_id: int) -> None:
        self.num_transfers += 1
        transfer_id = TransferId(self.num_transfers)
        self.step(transfers=(AdapterTransfer(transfer_id, AdapterId(adapter_id), num_bytes=1),))
        self.executor.finish_transfer(transfer_id)

    def begin(
        self, direction: Direction, block_ids: tuple[int, ...], slots: tuple[int, ...], **fields: Any
    ) -> TransferId:
        """Begin a copy with a plan of its own, which ends at once."""
        self.num_transfers += 1
        copy = KvTransfer(
            TransferId(self.num_transfers),
            direction,
            tuple(map(BlockId, block_ids)),
            tuple(map(HostSlot, slots)),
        )
        self.submit(transfers=(copy,), **fields)
        return copy.transfer_id

    def copy(
        self,
        direction: Direction,
        block_ids: tuple[int, ...],
        slots: tuple[int, ...],
        error: str | None = None,
    ) -> None:
        transfer_id = self.begin(direction, block_ids, slots)
        self.executor.finish_step()
        self.executor.finish_transfer(transfer_id, error)
