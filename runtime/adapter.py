"""An adapter as the engine's policies see it, and where it is: plain data."""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class AdapterLayers:
    """How an adapter's layers move to the device."""

    rank_sums: tuple[tuple[int, ...], ...]  # [layer][input group]: ranks of the group's targets
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


@dataclass(frozen=True, slots=True)
class AdapterOutline:
    """Facts from the header of an adapter's file, before its values are read."""

    rank: int  # the largest of its targets
    num_bytes: int  # on the device
    left_out: tuple[str, ...] = ()  # as in ``AdapterFacts``


class Residency(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The level of a version, its memory, and its history."""

    level: str = "disk"  # one of ``adapters.info.LEVELS``
    num_groups: int = 0  # layer groups of the load under way
    num_groups_loaded: int = 0  # of these, on the device
    device_bytes: int = 0
    host_bytes: int = 0
    kv_device_bytes: int = 0  # of cached prefixes, shared by versions with the same content
    kv_host_bytes: int = 0
    num_references: int = 0  # running requests
    num_waiting: int = 0  # requests
    num_uses: int = 0  # requests that began to run
    last_use_unix_s: float | None = None
    loads: dict[str, tuple[int, float]] = {}  # number and seconds, by transition
    evictions: dict[str, dict[str, int]] = {}  # by level and reason
