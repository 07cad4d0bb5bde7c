"""One ranking serves many victims, for as long as they are not used."""

from collections.abc import Iterator
from itertools import islice

from corun.runtime.memory.papers.libra import RankedAhead
from corun.runtime.memory.policies.lru import LruPolicy
from corun.runtime.memory.policies.policy import MemoryItem
from support.memory_items import Item


class Counting(LruPolicy):
    num_rankings = 0

    def __init__(self) -> None:
        super().__init__()
        self.worths: dict[MemoryItem, float] = {}  # of those above or below 0

    def returns(self) -> Iterator[MemoryItem]:
        return iter(())

    def worth(self, item: MemoryItem) -> float:
        return self.worths.get(item, 0.0)

    def victims(self, is_adapter: bool | None = None) -> Iterator[MemoryItem]:
        self.num_rankings += 1
        return super().victims(is_adapter)


class Ranked:
    """Three at a time."""

    def __init__(self, num_items: int) -> None:
        self.inner = Counting()
        self.policy = RankedAhead(self.inner, 3)
        self.items = [Item(f"{index}") for index in range(num_items)]
        for item in self.items:
            self.policy.offer(item)

    def names(self) -> str:
        return "".join(item.name for item in self.policy.victims() if isinstance(item, Item))

    def evict(self) -> str:
        (item,) = islice(self.policy.victims(), 1)
        assert isinstance(item, Item)
        self.policy.remove(item)
        return item.name


def test_who_asks_for_blocks_does_not_change_what_goes_first_of_all() -> None:
    policy = RankedAhead(Counting(), 3)
    adapters = [Item(f"{index}", is_adapter=True) for index in range(3)]
    blocks = [Item(f"{index}") for index in range(6)]
    for item in (*adapters, *blocks):
        policy.offer(item)
    assert list(islice(policy.victims(is_adapter=False), 1)) == blocks[:1]
    policy.remove(blocks[0])
    assert list(policy.victims(is_adapter=False)) == blocks[1:]
    assert list(policy.victims()) == [*adapters, *blocks[1:]]


def test_a_ranking_serves_so_many() -> None:
    ranked = Ranked(8)
    assert [ranked.evict() for _ in range(7)] == ["0", "1", "2", "3", "4", "5", "6"]
    assert ranked.inner.num_rankings == 3


def test_to_look_changes_nothing() -> None:
    ranked = Ranked(4)
    assert ranked.names() == ranked.names() == "0123"
    ranked.policy.withdraw(ranked.items[0])
    ranked.policy.visit(ranked.items[0], 0.0)
    ranked.policy.offer(ranked.items[0])
    assert ranked.names() == "1230"


def test_who_was_used_since_is_spared() -> None:
    ranked = Ranked(6)
    assert ranked.evict() == "0"
    ranked.policy.withdraw(ranked.items[1])
    ranked.policy.visit(ranked.items[1], 0.0)
    ranked.policy.offer(ranked.items[1])
    assert ranked.names() == "23451", "each once"
    assert [ranked.evict() for _ in range(5)] == ["2", "3", "4", "5", "1"]
    assert ranked.names() == ""


def test_who_cannot_be_taken_is_named_once_and_does_not_hide_the_others() -> None:
    ranked = Ranked(40)
    for number in range(1, 39):
        (item,) = islice(ranked.policy.victims(), 1, 2)  # the first must stay
        assert item is ranked.items[number]
        ranked.policy.remove(item)
    assert ranked.names() == "039"


def test_an_item_that_a_victim_exposes_goes_next_unless_it_is_worth_more() -> None:
    ranked = Ranked(8)
    parents = [Item("p"), Item("q"), Item("r")]
    ranked.inner.worths = dict(zip(parents, (-1.0, -1.0, 1.0), strict=True))
    assert ranked.evict() == "0"
    ranked.policy.offer(parents[0])
    assert ranked.names() == "p1234567"
    assert ranked.evict() == "p"
    ranked.policy.offer(parents[1])
    ranked.policy.withdraw(parents[1])
    ranked.policy.offer(parents[1])
    assert ranked.names()[0] == "1", "it was offered at another time"
    assert ranked.evict() == "1"
    ranked.policy.offer(parents[2])
    assert ranked.names().startswith("2") and ranked.names().endswith("r")
