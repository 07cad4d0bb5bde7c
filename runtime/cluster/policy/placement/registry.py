"""Placements by name, and those that ignore demand. Pure."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ....errors import ConfigError
from ....near_names import near_names
from ..reports import Shares
from .capacity_table import CapacityTable
from .plan import AdapterDemand, PlacementPlan, PlacementPolicy, Room, StoreServer, by_size, plan_of
from .sticky import StickyPlacement


class RandomPlacement(PlacementPolicy):
    """Puts each adapter at a random server, where it stays while the server has room."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311 -- no secret

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        room = Room(servers)
        new = []
        for adapter in by_size(demand):
            homes = [
                server_id
                for server_id in sorted(previous.get(adapter.name, ()))
                if server_id in room.free_bytes and room.fits(adapter, server_id)
            ]
            if homes:
                room.put(adapter, homes[0], 1.0)
            else:
                new.append(adapter)
        for adapter in new:
            fitting = [one for one in room.server_ids if room.fits(adapter, one)]
            home = self._rng.choice(fitting or [room.emptiest(adapter, room.server_ids)])
            room.put(adapter, home, 1.0)
        return plan_of(room.shares, demand, servers, previous)


class EverywherePlacement(PlacementPolicy):
    """Puts adapters at all servers while there is room, those with most demand first.

    The others get one server each, with most room.
    """

    def plan(
        self, demand: Sequence[AdapterDemand], servers: Sequence[StoreServer], previous: Shares
    ) -> PlacementPlan:
        room = Room(servers)
        for adapter in by_size(demand):  # each has at least one copy
            room.put(adapter, room.emptiest(adapter, room.server_ids), 0.0)
        for adapter in sorted(demand, key=lambda one: (-one.tokens_per_s, one.name)):
            homes = [one for one in room.server_ids if room.fits(adapter, one)]
            for server_id in homes:
                room.put(adapter, server_id, 1.0 / len(homes))
        return plan_of(room.shares, demand, servers, previous)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFacts:
    """Inputs for new placements."""

    capacity: CapacityTable | None = None  # required by placements that go by demand
    seed: int = 0  # of random choices


# Imported on use, as all of ``papers``.
def _loraserve(capacity: CapacityTable) -> PlacementPolicy:
    from ..papers.loraserve import LoraServePlacement

    return LoraServePlacement(capacity)


def _loraserve_as_printed(capacity: CapacityTable) -> PlacementPolicy:
    from ..papers.loraserve import LoraServePaperPlacement

    return LoraServePaperPlacement(capacity)


def _contiguous(_: PlacementFacts) -> PlacementPolicy:
    from ..papers.loraserve import ContiguousPlacement

    return ContiguousPlacement()


_BY_DEMAND: Mapping[str, Callable[[CapacityTable], PlacementPolicy]] = {
    "sticky": StickyPlacement,
    "loraserve": _loraserve,
    "loraserve-paper": _loraserve_as_printed,
}
_OTHERS: Mapping[str, Callable[[PlacementFacts], PlacementPolicy]] = {
    "random": lambda facts: RandomPlacement(facts.seed),
    "contiguous": _contiguous,
    "everywhere": lambda _: EverywherePlacement(),
}
PLACEMENTS = (*_BY_DEMAND, *_OTHERS)


def goes_by_demand(name: str) -> bool:
    """Return whether a placement needs a capacity table."""
    return name in _BY_DEMAND


def check_placement(name: str) -> None:
    """Raise ``ConfigError`` if the placement is unknown."""
    if name not in PLACEMENTS:
        known = ", ".join(PLACEMENTS)
        hint = near_names(name, PLACEMENTS)
        raise ConfigError(f"--placement is {name!r}, must be one of: {known}{hint}")


def check_live_placement(name: str, *, has_points: bool) -> None:
    """Raise ``ConfigError`` if the placement is unknown, or needs ``--operating-points``."""
    check_placement(name)
    if name in _BY_DEMAND and name != "sticky" and not has_points:
        raise ConfigError(
            f"--placement {name} needs --operating-points FILE, which corun simulate "
            "--operating-points FILE writes; --placement sticky does without"
        )


def make_placement(name: str, facts: PlacementFacts) -> PlacementPolicy:
    """Return a new placement. Raises ``ConfigError`` if it is unknown."""
    check_placement(name)
    if name in _OTHERS:
        return _OTHERS[name](facts)
    assert facts.capacity is not None, "it goes by demand"
    return _BY_DEMAND[name](facts.capacity)
