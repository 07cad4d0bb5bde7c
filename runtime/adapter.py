"""One adapter as the engine's policies see it: plain data that comes with its registration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterLayers:
    """How an adapter's layers move to the device."""

    rank_sums: tuple[tuple[int, ...], ...]  # [layer][input group]: ranks of the group's targets
    group_bytes: tuple[int, ...]  # over the link, by layer group, in the order of loading
    group_of_layer: tuple[int, ...]  # which layers are copied together, ascending from 0


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What is known of an adapter once its files have been read and checked."""

    digest: str  # of configuration and tensors
    rank: int  # the largest of its targets
    num_bytes: int  # on the device
    scale: float = 1.0  # factor on the adapter as a whole
    host_bytes: tuple[int, ...] = ()  # in the host's memory, by layer, in whole pages
    layers: AdapterLayers | None = None  # None = no plan uses them
    left_out: tuple[str, ...] = ()  # what of its file changes no text answer, and why: phrases


@dataclass(frozen=True, slots=True)
class AdapterOutline:
    """What the header of an adapter's file says, before its values have been read."""

    rank: int  # the largest of its targets
    num_bytes: int  # on the device
    left_out: tuple[str, ...] = ()  # as of ``AdapterFacts``
