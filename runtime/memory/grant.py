"""What a request needs of memory, what it holds, and what a plan carries out. Plain data."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..plan import AdapterId, BlockId, HostMove, HostPlaceId, Transfer, TransferId
from ..request import Request
from .kv_tree import KvNode


class Verdict(enum.Enum):
    """Answer to a candidate for admission."""

    ADMITTED = "admitted"  # it runs, and no longer waits in the policy
    LOADING = "loading"  # its adapter or its KV is being copied to allocated memory
    NO_KV = "no_kv"  # no room for its known and predicted tokens
    NO_ADAPTER = "no_adapter"  # no room for its adapter, or the adapter is leaving the device


class RunningRequests(Protocol):
    """The running requests, as memory sees them."""

    headroom_blocks: int  # to be left free by new requests and by loads that no request waits for

    def __len__(self) -> int:
        """Return their number."""

    def num_growth_blocks(self, newcomer: Request | None = None, num_found_blocks: int = 0) -> int:
        """Return how many more blocks they are predicted to need at the same time.

        ``newcomer``: runs with them, and has found ``num_found_blocks``.
        """


@dataclass(slots=True, eq=False, kw_only=True)
class Need:
    """What a request needs in order to run. Each kind of memory has a field, in bytes."""

    request: Request
    kv_bytes: int  # of its known tokens, in whole blocks
    adapter_bytes: int  # 0 = the base model
    running: RunningRequests  # their growth and the request's is reserved
    may_displace: bool  # whether adapters may be evicted that other waiting requests name
    may_start_cold: Callable[[], bool]  # whether it runs while its adapter is loading, if it is


@dataclass(slots=True, eq=False)
class Grant:
    """The memory that a request holds, of all kinds.

    Its computed whole blocks are in the prefix tree. All other blocks are its own.
    """

    adapter_id: AdapterId
    block_ids: list[BlockId] = field(default_factory=list)  # in order
    path: list[KvNode] = field(default_factory=list)  # of its first blocks
    num_retired_blocks: int = 0  # announced to be free when steps in flight have ended

    def own_block_ids(self) -> list[BlockId]:
        """Return the blocks that are not in the tree.

        The tree may have an equal block instead of one of the first.
        """
        own = [
            block_id
            for block_id, node in zip(self.block_ids, self.path, strict=False)
            if node.block_id != block_id
        ]
        return own + self.block_ids[len(self.path) :]


class MemoryCommands(NamedTuple):
    """What the next plan does with memory: the last fields of ``StepPlan``, in its order."""

    evict_adapters: tuple[AdapterId, ...]
    freed_blocks: tuple[BlockId, ...]
    transfers: tuple[Transfer, ...]
    promoted_transfers: tuple[TransferId, ...]
    load_order: tuple[TransferId, ...]
    host_evictions: tuple[HostPlaceId, ...]
    host_move: HostMove | None
