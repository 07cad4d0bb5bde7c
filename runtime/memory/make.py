"""Assembles the accounts of device memory, for engines and simulated engines. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError, ResourceError
from .adapter_cache import AdapterCache
from .block_pool import BlockPool, MemoryBudget
from .device_memory import DeviceMemory
from .host_budget import HostSections
from .host_cache import HostCache
from .kv_tree import KvTree
from .pages import Pages
from .policies.policy import MemoryFacts, RankingPolicy
from .policies.registry import make_memory_policy
from .reload_cost import PolicyInputs, ReloadCosts
from .transfers import TransferTable

MakeMemoryPolicy = Callable[[MemoryFacts], RankingPolicy]

_DEFAULT_ADAPTER_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySizes:
    """Sizes of memory."""

    capacity_bytes: int  # KV blocks and adapters together
    num_blocks: int  # limit of blocks; all physical ones if there are no pages
    block_size: int  # tokens
    block_bytes: int
    max_model_len: int  # tokens of one request
    # For adapters only; None = adapters share memory with blocks, or the policy splits it.
    adapter_limit_bytes: int | None = None
    has_pages: bool = False  # blocks and adapters have pages of ``block_bytes``
    max_history_blocks: int | None = None  # blocks that no request uses; None = no limit
    num_host_slots: int = 0  # KV blocks that fit the host if adapters need no memory there
    host_sections: HostSections | None = None  # shared with adapters; None = each has its own memory
    # Share for adapters under policies that split memory; None = not configured.
    adapter_share: float | None = None


def adapter_share(asked: float | None) -> float:
    """Return the share of split memory that is for adapters."""
    return _DEFAULT_ADAPTER_SHARE if asked is None else asked


def make_device_memory(
    sizes: MemorySizes,
    policy: str | MakeMemoryPolicy,
    costs: ReloadCosts,
    host: HostCache | None = None,
    transfers: TransferTable | None = None,
    *,
    keeps_prefixes: bool = True,
) -> DeviceMemory:
    """Return a memory ranked by ``policy``, which is a name or a function that makes a policy.

    ``keeps_prefixes``: whether later requests can use KV.

    Raises ``ConfigError`` if the policy is unknown, or if ``adapter_share`` is set for a policy
    that does not split memory, and ``ResourceError`` if a part is too small for one request.
    """
    inputs = PolicyInputs(costs)
    facts = MemoryFacts(
        reload_cost_s=costs,
        mean_batch_size=inputs.batch_size,
        kv_reuse_share=inputs.kv_reuse,
        num_blocks=sizes.num_blocks,
    )
    ranking = make_memory_policy(policy, facts) if isinstance(policy, str) else policy(facts)
    limit_bytes, num_blocks = sizes.adapter_limit_bytes, sizes.num_blocks
    if limit_bytes is None and ranking.rules.is_split:
        share = adapter_share(sizes.adapter_share)
        limit_bytes = int(sizes.capacity_bytes * share)
        num_blocks = min(num_blocks, (sizes.capacity_bytes - limit_bytes) // sizes.block_bytes)
        _check_parts(sizes, num_blocks, share)
    elif limit_bytes is None and sizes.adapter_share is not None:
        raise ConfigError(
            f"--adapter-memory-fraction is {sizes.adapter_share:g}, but adapters share the memory "
            "with KV blocks here; leave it out, or choose --memory-policy static-split"
        )
    budget = MemoryBudget(sizes.capacity_bytes)
    pages = None
    if sizes.has_pages:
        assert sizes.capacity_bytes % sizes.block_bytes == 0, sizes
        pages = Pages(sizes.capacity_bytes // sizes.block_bytes, sizes.block_bytes)
    tree = KvTree(sizes.block_size, sizes.block_bytes, ranking) if keeps_prefixes else None
    memory = DeviceMemory(
        BlockPool(num_blocks, sizes.block_bytes, budget, pages),
        AdapterCache(budget, limit_bytes, ranking, pages),
        host,
        tree,
        transfers=transfers,
        max_history_blocks=sizes.max_history_blocks,
        inputs=inputs,
        num_host_slots=sizes.num_host_slots if keeps_prefixes and ranking.rules.keeps_history else 0,
    )
    if sizes.host_sections is not None:
        memory.share_host(sizes.host_sections)
    return memory


def _check_parts(sizes: MemorySizes, num_blocks: int, share: float) -> None:
    num_tokens = num_blocks * sizes.block_size
    if num_tokens < sizes.max_model_len:
        raise ResourceError(
            f"with {share:.0%} of the memory for adapters (--adapter-memory-fraction), the KV of "
            f"{num_tokens} tokens fits the rest, but one request may need {sizes.max_model_len} "
            "(--max-model-len); lower either, or raise --memory-gib"
        )
