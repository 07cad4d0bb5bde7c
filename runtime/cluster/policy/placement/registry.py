"""Placements by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....errors import ConfigError
from ....near_names import near_names
from .capacity_table import CapacityTable
from .plan import PlacementPolicy
from .simple import EverywherePlacement, RandomPlacement
from .sticky import StickyPlacement


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
    from ..papers.loraserve_as_printed import LoraServePaperPlacement

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
