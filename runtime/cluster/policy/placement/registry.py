"""Placements by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....errors import ConfigError
from ....near_names import near_names
from .as_printed import LoraServePaperPlacement
from .loraserve import LoraServePlacement
from .operating_points import OperatingPoints
from .plan import PlacementPolicy
from .simple import ContiguousPlacement, EverywherePlacement, RandomPlacement
from .sticky import StickyPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFacts:
    """What placements are made with."""

    points: OperatingPoints
    seed: int = 0  # of what is drawn


PLACEMENTS: Mapping[str, Callable[[PlacementFacts], PlacementPolicy]] = {
    "sticky": lambda facts: StickyPlacement(facts.points),
    "loraserve": lambda facts: LoraServePlacement(facts.points),
    "loraserve-paper": lambda facts: LoraServePaperPlacement(facts.points),
    "random": lambda facts: RandomPlacement(facts.seed),
    "contiguous": lambda _: ContiguousPlacement(),
    "everywhere": lambda _: EverywherePlacement(),
}


def make_placement(name: str, facts: PlacementFacts) -> PlacementPolicy:
    """Return a new placement. Raises ``ConfigError`` if there is none of this name."""
    try:
        make = PLACEMENTS[name]
    except KeyError:
        known = ", ".join(PLACEMENTS)
        hint = near_names(name, PLACEMENTS)
        raise ConfigError(f"--placement is {name!r}, must be one of: {known}{hint}") from None
    return make(facts)
