"""An adapter as the engine's policies see it: plain data from its registration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterLayers:
    """How an adapter's layers move to the device."""

    # [layer][input group]: ranks of the group's targets, each in whole tiles of 8.
    rank_sums: tuple[tuple[int, ...], ...]
    group_bytes: tuple[int, ...]  # over the link, by layer group in order of loading
    group_of_layer: tuple[int, ...]  # layer group of each layer, ascending from 0
    not_by_workers: str = ""  # a part that CPU workers do not compute, e.g. "DoRA"


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Facts about an adapter with files that have been read and checked."""

    digest: str  # of configuration and tensors
    rank: int  # the largest of its targets
    num_bytes: int  # on the device
    scale: float = 1.0  # factor on the adapter as a whole
    host_bytes: tuple[int, ...] = ()  # in host memory, by layer, in whole pages
    layers: AdapterLayers | None = None  # None = not used by plans
    left_out: tuple[str, ...] = ()  # tensors that do not affect text answers, with reasons
    vocab_size: int | None = None  # tokens of its own vocabulary; None = the base's
    run_pages: tuple[int, ...] = ()  # of ``num_bytes``, each run of pages; () = it has no pages


@dataclass(frozen=True, slots=True)
class AdapterOutline:
    """Facts from the header of an adapter's file, before its values are read."""

    rank: int  # the largest of its targets
    num_bytes: int  # on the device
    left_out: tuple[str, ...] = ()  # as in ``AdapterFacts``
