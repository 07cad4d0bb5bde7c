"""The order of last visits, with and without idle adapters."""

import pytest
from corun.runtime.memory.policies.lru import LruPolicy
from corun.runtime.memory.policies.policy import MemoryRules
from support.memory_items import Item

KEEPS = MemoryRules()
DISCARDS = MemoryRules(keeps_idle_adapters=False)


@pytest.mark.parametrize(("rules", "expected"), [(KEEPS, "3012"), (DISCARDS, "0231")])
def test_by_last_visit_and_not_by_offer(rules: MemoryRules, expected: str) -> None:
    policy = LruPolicy(rules)
    items = [Item(f"{index}", is_adapter=index % 2 == 0) for index in range(4)]
    for index in (3, 0, 1, 2):
        policy.visit(items[index], 0.0)
    for item in items:
        policy.offer(item)
    assert "".join(item.name for item in policy.victims() if isinstance(item, Item)) == expected
