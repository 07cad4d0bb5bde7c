"""Connects adapters: from the options to the registry, the arena and the device."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...adapter import AdapterFacts, AdapterLayers, AdapterOutline
from ...adapters.base_names import BaseRemarks
from ...adapters.checkpoint import WEIGHTS_NAME
from ...adapters.content import AdapterContent, FileStamp
from ...adapters.convention_files import ConventionReader, settled_stamps_of, stamps_of
from ...adapters.conventions import CONVENTION_NAMES, NO_CONVENTIONS, AdapterConventions, with_vocabulary
from ...adapters.dir_changes import FoundAdapter
from ...adapters.dir_watch import LoraDir, LoraDirWatch
from ...adapters.folder_files import AdapterRoots
from ...adapters.load import OpenAdapter, open_adapter
from ...adapters.load_mix import open_mix
from ...adapters.names import unknown_name
from ...adapters.peft_config import CONFIG_NAME
from ...adapters.registry import AdapterVersion
from ...adapters.resolved import AdapterPath, AdapterReader, MixSource
from ...adapters.state_file import AdapterStateFile
from ...adapters.vocabulary import BaseTokens
from ...config.demo import model_name
from ...config.engine import EngineConfig
from ...config.notations import LoraModule, parse_lora_modules, parse_lora_resolver
from ...errors import AdapterError, AdapterUnavailableError, ConfigError, RequestError
from ...file_calls import FILES, Place, SilentError
from ...plan import AdapterTransfer
from ..adapter_manager import AdapterManager
from ..adapter_reading import MakeRoom
from .base_model import read_served_base
from .resources import ArenaPlan

if TYPE_CHECKING:
    from ....gpu.adapters.arrival import AdapterLoad
    from ....gpu.adapters.copier import DevicePages
    from ....gpu.adapters.host import GroupLayers, HostAdapters, RegisteredAdapter
    from ....gpu.execution.assemble import LoadedModel
    from ....gpu.execution.executor import AdapterFetch
    from ....profiles.profile import Profile

_LOG = logging.getLogger(__name__)

ALL = "all"  # all adapters, even if one has this name
_SOURCES_PER_REPORT = 50


def base_names(config: EngineConfig) -> tuple[str, ...]:
    """Return the base model's names, which no adapter may have."""
    assert config.model is not None
    return tuple(dict.fromkeys((model_name(config), config.model)))


def adapter_roots(config: EngineConfig) -> AdapterRoots:
    """Return the directories that the options name for adapters."""
    resolvers = [parse_lora_resolver(text) for text in config.lora_resolver]
    directories = [path for kind, path in resolvers if kind == "directory" and path is not None]
    return AdapterRoots.of(config.lora_dir, config.allowed_lora_dirs, directories)


def make_host_adapters(
    config: EngineConfig,
    loaded: "LoadedModel",
    arena: ArenaPlan,
    pages: "DevicePages | None",
    profile: "Profile | None",
    fill_cpus: tuple[int, ...] = (),
) -> "HostAdapters":
    """Make the arena and its loader from PEFT directories. ``pages``, ``fill_cpus``: see ``ArenaSize``."""
    from ....gpu.adapters.host import ArenaSize, one_group
    from ....gpu.execution import assemble
    from ....gpu.model.base_weights import StoredBaseWeights
    from ....gpu.model.source import ModelSource

    assert config.model is not None
    source = ModelSource(config.model, config.revision, config.trust_remote_code)
    base = StoredBaseWeights(source, loaded.dtype)

    remarks, roots = BaseRemarks(read_served_base(source)), adapter_roots(config)

    def open_directory(path: str) -> OpenAdapter:
        try:
            adapter = open_adapter(
                Path(path), loaded.target_map, max_rank=config.max_lora_rank, base=base, roots=roots
            )
        except (AdapterError, SilentError) as error:
            silent = error if isinstance(error, SilentError) else error.__cause__
            if not isinstance(silent, SilentError):
                raise
            # Not a fault of the adapter.
            raise AdapterUnavailableError(f"cannot read {path}: {silent.strerror}") from error
        remarks.log(path, adapter.spec.base_model_name_or_path)
        return adapter

    def open_source(path: AdapterPath) -> AdapterReader:
        if isinstance(path, str):
            return open_directory(path)
        return open_mix(path, open_directory, config.max_lora_rank)

    is_device_memory = arena.idle_bytes is not None
    size = ArenaSize(arena.num_bytes, arena.is_elastic, is_device_memory, pages, arena.sections, fill_cpus)
    group_layers: GroupLayers = one_group
    if profile is not None:
        from .coexecution import layer_grouper

        group_layers = layer_grouper(profile)
    return assemble.make_host_adapters(loaded, size, open_source, group_layers)


class HostFiles:
    """See ``AdapterFiles``: reads adapters and registers them with the host's."""

    def __init__(self, host: "HostAdapters", conventions: ConventionReader | None) -> None:
        """``conventions``: None = all adapters have those of the base."""
        self._host = host
        self._conventions = conventions

    def outline(self, path: AdapterPath) -> AdapterOutline:
        return AdapterOutline(*self._host.outline(path))

    def begin(self, path: AdapterPath) -> AdapterContent | None:
        if isinstance(path, MixSource):
            return None
        with _named_errors(path):
            before = stamps_of(Path(path), CONVENTION_NAMES)
            begun = self._host.begin(path)
            if begun is None:
                return None
            try:
                conventions = self._read_conventions(Path(path), begun.vocab_size, before)
            except BaseException:
                self._host.remove_content(begun.digest)
                raise
        return AdapterContent(_facts(begun), conventions, is_read=False)

    def read(self, path: AdapterPath, make_room: MakeRoom, known: AdapterVersion | None) -> AdapterContent:
        with _named_errors(path):
            if isinstance(path, MixSource):
                facts, is_kept = self._register(path, make_room)
                return AdapterContent(facts, path.conventions, None, is_kept)
            return self._read(Path(path), make_room, known)

    def _read(self, folder: Path, make_room: MakeRoom, known: AdapterVersion | None) -> AdapterContent:
        before = stamps_of(folder, CONVENTION_NAMES)
        weights_stamps = settled_stamps_of(folder, (CONFIG_NAME, WEIGHTS_NAME))
        if known is not None and weights_stamps and weights_stamps == known.weights_stamps:
            facts, is_kept = known.facts, False
        else:
            facts, is_kept = self._register(str(folder), make_room)
        conventions = self._read_conventions(folder, facts.vocab_size, before)
        return AdapterContent(facts, conventions, weights_stamps, is_kept)

    def _register(self, path: AdapterPath, make_room: MakeRoom) -> tuple[AdapterFacts, bool]:
        adapter = self._host.register(path, make_room)
        return _facts(adapter), adapter.is_kept

    def _read_conventions(
        self, folder: Path, vocab_size: int | None, before: Sequence[FileStamp | None]
    ) -> AdapterConventions:
        """Raises ``AdapterError`` if the stamps of their files are not ``before`` any more."""

        def read(_: Place) -> tuple[AdapterConventions, Sequence[FileStamp | None]]:
            if self._conventions is None:
                conventions = with_vocabulary(NO_CONVENTIONS, vocab_size)
            else:
                conventions = self._conventions.read(folder, vocab_size)
            return conventions, stamps_of(folder, CONVENTION_NAMES)

        conventions, after = FILES.call(read, str(folder))
        if after != before:
            raise AdapterError(
                f"the files in {folder} changed while they were read; load the adapter again when "
                "they are complete"
            )
        return conventions


@contextmanager
def _named_errors(path: AdapterPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error


def _facts(adapter: "RegisteredAdapter") -> AdapterFacts:
    layers = AdapterLayers(
        adapter.rank_sums, adapter.group_bytes, adapter.group_of_layer, adapter.not_by_workers
    )
    return AdapterFacts(
        adapter.digest,
        adapter.rank,
        adapter.num_bytes,
        host_bytes=adapter.host_bytes,
        layers=layers,
        left_out=adapter.left_out,
        vocab_size=adapter.vocab_size,
        run_pages=adapter.run_pages,
    )


def adapter_fetch(host: "HostAdapters", manager: AdapterManager, cpus: tuple[int, ...]) -> "AdapterFetch":
    """Return the executor's loads, which check that a version's files are unchanged."""
    from ....gpu.execution.executor import AdapterFetch

    host.store.on_first_read = manager.first_read_ended

    def fetch(transfer: AdapterTransfer) -> "AdapterLoad":
        assert transfer.host is not None, transfer
        version = manager.version(transfer.adapter_id)
        return host.fetch(version.digest, version.path, transfer.host)

    return AdapterFetch(fetch, host.evict, cpus, host.store)


def make_manager(
    config: EngineConfig, host: "HostAdapters", tokens: BaseTokens, background_cpus: tuple[int, ...]
) -> AdapterManager:
    """Make the adapter manager. Raises ``ConfigError`` for a bad state file."""
    path = config.lora_state_file
    state_file = None if path is None else AdapterStateFile(Path(path).expanduser())
    conventions = None
    if config.adapter_templates == "use":
        conventions = ConventionReader(tokens, adapter_roots(config))
    files = HostFiles(host, conventions)
    return AdapterManager(files, base_names(config), host, state_file, background_cpus)


def register_adapters(
    config: EngineConfig,
    manager: AdapterManager,
    sources: Sequence[LoraModule],
    on_progress: Callable[[str], None],
    background_cpus: tuple[int, ...],
) -> None:
    """Register the adapters of the options and of the state file.

    Adapters of ``--lora-modules``, ``--preload`` and ``--pin`` must be servable; failures of others
    are logged. Only preloaded and pinned adapters are read completely.
    """
    _check_given("--pin", config.pin, sources)
    is_all = config.preload == (ALL,)
    if not is_all:
        _check_given("--preload", config.preload, sources)
    found = {source.name: source.path for source in sources}
    remembered = manager.remembered
    found |= {one.name: one.path for one in remembered}  # these take precedence over options
    lora_dir, seen = _look(config)
    named = {module.name for module in parse_lora_modules(config.lora_modules)}
    needed = named.union(config.preload, config.pin) - {one.name for one in remembered}
    pinned = {one.name for one in remembered if one.pinned}
    read = found.keys() if is_all else pinned.union(config.preload, config.pin)
    for number, (name, path) in enumerate(found.items(), start=1):
        if name in read or number % _SOURCES_PER_REPORT == 1:
            what = "reading" if name in read else "looking at"
            on_progress(f"{what} adapter {number} of {len(found)}: {name}")
        try:
            (manager.add_now if name in read else manager.add_unread)(name, path)
        except AdapterError as error:
            if name in needed:
                raise
            _LOG.error("not served: %s", error)
    for name in dict.fromkeys((*config.pin, *sorted(pinned))):
        try:
            manager.pin_now(name, is_pinned=True)
        except RequestError as error:
            if name in config.pin:
                raise ConfigError(f"--pin {name}: {error}") from error
            _LOG.error("not pinned: %s", error)
    if lora_dir is not None and config.watch_lora_dir == "on":
        known = {name: one for name, one in seen.items() if found.get(name) == one.path}
        manager.follow(LoraDirWatch(lora_dir, known, manager.notify, background_cpus))


def _look(config: EngineConfig) -> tuple[LoraDir | None, dict[str, FoundAdapter]]:
    """Scan ``--lora-dir``, without reading its files."""
    if config.lora_dir is None:
        return None, {}
    lora_dir = LoraDir(Path(config.lora_dir), base_names(config), adapter_roots(config))
    return lora_dir, lora_dir.look()


def _check_given(flag: str, names: Sequence[str], sources: Sequence[LoraModule]) -> None:
    """Raise ``ConfigError`` unless these adapters exist."""
    known = [source.name for source in sources]
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} {name}: {unknown_name(name, known)}")
