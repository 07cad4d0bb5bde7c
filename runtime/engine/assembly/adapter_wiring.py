"""Wires adapters up: from the options to the registry, from there to the arena and the device."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...adapter import AdapterFacts, AdapterLayers
from ...adapters.load import OpenAdapter, open_adapter
from ...adapters.sources import AdapterSource, parse_lora_module
from ...config.demo import model_name
from ...config.engine import EngineConfig
from ...errors import AdapterError, ConfigError, RequestError
from ...plan import AdapterTransfer
from ..adapter_manager import AdapterManager, MakeRoom, ReadAdapter
from .resources import ArenaPlan

if TYPE_CHECKING:
    from ....gpu.adapters.arrival import AdapterLoad
    from ....gpu.adapters.host import GroupLayers, HostAdapters
    from ....gpu.execution.assemble import LoadedModel
    from ....gpu.execution.executor import AdapterFetch
    from ....profiles.profile import Profile

_LOG = logging.getLogger(__name__)


def base_names(config: EngineConfig) -> tuple[str, ...]:
    """What the base model is called, so that no adapter is called the same."""
    assert config.model is not None
    return tuple(dict.fromkeys((model_name(config), config.model)))


def make_host_adapters(
    config: EngineConfig, loaded: "LoadedModel", arena: ArenaPlan, slab_bytes: int | None,
    profile: "Profile | None",
) -> "HostAdapters":  # fmt: skip
    """Make the arena, what fills it from PEFT directories, and the adapters' slab, if any."""
    from ....gpu.adapters.copier import SlabSize
    from ....gpu.adapters.host import ArenaSize, one_group
    from ....gpu.execution import assemble

    def open_source(path: str) -> OpenAdapter:
        return open_adapter(Path(path), loaded.target_map, max_rank=config.max_lora_rank)

    slab = None if slab_bytes is None else SlabSize(slab_bytes, config.max_lora_rank)
    size = ArenaSize(arena.num_bytes, arena.is_elastic, arena.idle_bytes is not None, slab)
    group_layers: GroupLayers = one_group
    if profile is not None:
        from .coexecution import layer_grouper

        group_layers = layer_grouper(profile)
    return assemble.make_host_adapters(loaded, size, open_source, group_layers)


def facts_reader(host: "HostAdapters") -> ReadAdapter:
    """What registering needs."""

    def read_adapter(path: str, make_room: MakeRoom) -> tuple[AdapterFacts, bool]:
        adapter = host.register(path, make_room)
        layers = AdapterLayers(adapter.rank_sums, adapter.group_bytes, adapter.group_of_layer)
        facts = AdapterFacts(
            adapter.digest, adapter.rank, adapter.num_bytes,
            host_bytes=adapter.host_bytes, layers=layers,
        )  # fmt: skip
        return facts, adapter.is_kept

    return read_adapter


def adapter_fetch(
    host: "HostAdapters", manager: AdapterManager, cpus: tuple[int, ...]
) -> "AdapterFetch":
    """What the executor's loads do: a version's files must still be what was registered."""
    from ....gpu.execution.executor import AdapterFetch

    def fetch(transfer: AdapterTransfer) -> "AdapterLoad":
        assert transfer.host is not None, transfer
        version = manager.version(transfer.adapter_id)
        return host.fetch(version.digest, version.path, transfer.host)

    return AdapterFetch(fetch, host.evict, cpus)


def register_adapters(
    config: EngineConfig,
    manager: AdapterManager,
    sources: Sequence[AdapterSource],
    on_progress: Callable[[str], None],
) -> None:
    """Register the adapters of the options; one that was named singly must be servable."""
    named = {parse_lora_module(text).name for text in config.lora_modules}
    for number, source in enumerate(sources, start=1):
        on_progress(f"reading adapter {number} of {len(sources)}: {source.name}")
        try:
            manager.add_now(source.name, source.path)
        except AdapterError as error:
            if source.name in named:
                raise
            _LOG.error("not served: %s", error)
    for name in config.pin:
        try:
            manager.pin_now(name, is_pinned=True)
        except RequestError as error:
            raise ConfigError(f"--pin {name}: {error}") from error
