"""LRU with other rules: what other systems do beside the order of evictions. Plain data.

vLLM divides memory into two independent parts, so KV may stay without its adapter. The others do
not keep idle adapters, so kept KV is always without its adapter.
"""

from collections.abc import Mapping

from ..policies.policy import MemoryRules

BASELINES: Mapping[str, MemoryRules] = {
    "static-split": MemoryRules(is_split=True, ties_kv_to_adapter=False),
    "discard-idle": MemoryRules(keeps_idle_adapters=False, ties_kv_to_adapter=False),
    "slora": MemoryRules(keeps_idle_adapters=False, ties_kv_to_adapter=False, keeps_history=False),
}
