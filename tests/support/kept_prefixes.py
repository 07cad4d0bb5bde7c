"""Cached prefixes in a memory after its requests have ended."""

from corun.runtime.memory.device_memory import DeviceMemory
from corun.runtime.memory.kv_tree import KvNode
from corun.runtime.plan import BASE_ADAPTER, AdapterId, TransferResult
from support.invariants import check_invariants
from support.scheduling import BLOCK_SIZE, facts

NAMESPACE = b"n"


def keep(
    memory: DeviceMemory,
    first_token: int,
    num_blocks: int,
    *,
    adapter_id: AdapterId = BASE_ADAPTER,
    namespace: bytes = NAMESPACE,
) -> list[KvNode]:
    """Let a request compute so many blocks, and end."""
    block_ids = memory.pool.allocate(num_blocks)
    assert block_ids is not None
    path: list[KvNode] = []
    for number, block_id in enumerate(block_ids):
        tokens = (first_token + number,) * BLOCK_SIZE
        parent = path[-1] if path else None
        node = memory.prefixes.store(adapter_id, namespace, parent, tokens, block_id, 0.0)
        path.append(node)
    memory.prefixes.release(path)
    check_invariants(memory)
    return path


def tokens_of(first_token: int, num_blocks: int) -> tuple[int, ...]:
    return tuple(first_token + number for number in range(num_blocks) for _ in range(BLOCK_SIZE))


def num_found(memory: DeviceMemory, first_token: int, namespace: bytes = NAMESPACE) -> int:
    return len(memory.prefixes.match(namespace, tokens_of(first_token, 8), 8 * BLOCK_SIZE))


def load(memory: DeviceMemory, adapter_id: int, num_bytes: int) -> None:
    assert memory.loads.begin(AdapterId(adapter_id), facts(num_bytes), 0.0)
    (transfer,) = memory.transfers.take_commands()
    memory.end_transfer(TransferResult(transfer.transfer_id), 0.0)
