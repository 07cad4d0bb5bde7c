"""Builds an engine from its configuration: the only module that knows all parts.

``build_engine`` is imported by engine processes and by in-process engines. Importing this module
loads no torch, calling it does. Modules that only some engines need are imported where needed.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ....shm.huge_pages import begin_pages_ahead, end_pages_ahead
from ....shm.light_numba import import_numba
from ....shm.stale import remove_stale_names
from ...adapters.info import AdapterInfo, num_fitting
from ...adapters.sources import collect_sources
from ...adapters.vocabulary import BaseTokens
from ...config.demo import model_name, with_demo
from ...config.engine import SIMULATED_BASELINES, EngineConfig
from ...config.notations import LoraModule
from ...errors import ConfigError
from ...file_calls import FILES
from ...grammar.compiled import Grammars
from ...grammar.tokenizer import TokenTree
from ...machine.facts import MachineFacts, read_machine_facts
from ...machine.gc_control import collection_paused, keep_imported, keep_living
from ...machine.unused_memory import give_back_unused
from ...memory.host_cache import HostCache
from ...scheduler.limits import blocks_for
from ...scheduler.scheduler import Scheduler
from ..adapter_manager import AdapterManager
from ..core import CoreConfig, EngineCore
from ..heartbeat import Heartbeat
from ..loop import OwnPolicies
from ..memory_watch import watch_memory
from ..messages import ModelInfo, TokenizerSpec
from ..stats import cpu_stats
from ..tokenizer import ModelTokenizer, read_tokenizer
from .adapter_wiring import adapter_fetch, base_names, make_host_adapters, make_manager, register_adapters
from .base_model import optional_packages, weights_ahead_bytes
from .placement import Placement, kept_directory, place_engine, warn_of_what_is_not_kept
from .resources import ArenaPlan, MemoryPlan
from .scheduling import make_scheduler
from .sizes import copies_adapters, max_model_len_of, plan_engine_memory

if TYPE_CHECKING:
    from ....gpu.adapters.host import HostAdapters
    from ....gpu.execution.assemble import LoadedModel
    from ....gpu.execution.executor import DeviceExecutor
    from ....gpu.execution.sampler import Sampler
    from ....gpu.kv.host import HostKv
    from ....gpu.model.generation import GenerationDefaults
    from ....gpu.model.source import ModelSource
    from ....profiles.models import MachineModel
    from ....profiles.profile import Profile
    from .coexecution import Coexecution

_LOG = logging.getLogger(__name__)


_MIB = 2**20
_GIB = 2**30


def summary_lines(
    info: ModelInfo, adapters: Sequence[AdapterInfo], backends: dict[str, str], cores: str
) -> tuple[str, ...]:
    """Describe an engine that is ready, one aspect a line.

    ``backends`` maps what is computed (attention, linear, LoRA) to the back end's name;
    ``cores`` describes the placement of engine and workers.
    """
    chosen = ", ".join(f"{what} {name}" for what, name in backends.items())
    lines: tuple[str, ...] = (
        f"model     {info.name} ({info.dtype} on {info.device}; {chosen})",
        f"device    {', '.join(f'{what} {name}' for what, name in info.device_choices.items())}",
        f"weights   {_weights_line(info)}",
        f"context   {info.max_model_len} tokens per request",
        f"memory    {_memory_line(info)}, {_kv_line(info)}",
        f"cores     {cores}",
        f"adapters  {_adapter_line(info, adapters)}",
    )
    if info.has_profile_failed:
        lines += ("loads     co-execution is off, as the machine could not be measured",)
    return lines


def _weights_line(info: ModelInfo) -> str:
    full_bytes = info.weight_bytes - info.quantized_bytes
    line = f"{full_bytes / _MIB:.1f} MiB in {info.dtype}"
    if not info.quantized_bytes:
        return line
    return f"{info.quantized_bytes / _MIB:.1f} MiB in {info.backends['weights']}, {line}"


def _memory_line(info: ModelInfo) -> str:
    line = f"{info.memory_bytes / _GIB:.3g} GiB for KV and adapters together"
    if info.adapter_memory_bytes is None:
        return line
    return f"{line}, {info.adapter_memory_bytes / _GIB:.3g} GiB of it for adapters alone"


def _kv_line(info: ModelInfo) -> str:
    line = f"KV for {info.kv_capacity_tokens} tokens"
    return f"{line} and up to {info.host_kv_tokens} on the host" if info.host_kv_tokens else line


def _adapter_line(info: ModelInfo, adapters: Sequence[AdapterInfo]) -> str:
    ready = [adapter for adapter in adapters if adapter.state == "ready"]
    if not ready:
        return "none"
    total_bytes = sum(adapter.num_bytes for adapter in ready)
    room_bytes = info.adapter_memory_bytes
    if room_bytes is None:  # memory without that of one request of the full context
        room_bytes = info.memory_bytes - info.context_bytes
    number = num_fitting(ready, room_bytes)
    ranks = sorted({adapter.rank for adapter in ready})
    span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    fit = "all fit" if number == len(ready) else f"{number} of them fit"
    failed = len(adapters) - len(ready)
    tail = f"; {failed} failed to load" if failed else ""
    return f"{len(ready)} ready, {span}, {total_bytes / _MIB:.1f} MiB; {fit} at once{tail}"


def make_grammars(
    tokenizer: ModelTokenizer,
    config: Any,
    defaults: "GenerationDefaults",
    notify: Callable[[], None],
    cpus: tuple[int, ...],
) -> Grammars:
    """Return the grammars for a model. Their tree of tokens is not begun yet.

    ``config``: transformers' configuration of the text model; ``notify``, ``cpus``: see
    ``Grammars``.
    """
    num_own = max(tokenizer.tokens.ids.values(), default=-1) + 1
    num_ids = max(int(config.vocab_size), num_own)
    # The tree needs an end token. Without one in the model, answers end with their grammars, and
    # no text has the last token.
    ends = [one for one in defaults.eos_token_ids if one < num_own] or [num_own - 1]
    tree = TokenTree(tokenizer.backend, num_ids=num_ids, eos_token_ids=ends)
    return Grammars(tree, notify, cpus)


def make_sampler(grammars: Grammars, defaults: "GenerationDefaults", cpus: tuple[int, ...]) -> "Sampler":
    """Return a sampler that follows ``grammars`` with a thread on ``cpus``."""
    from ....gpu.execution.sampler import Sampler

    return Sampler(defaults.eos_token_ids, grammars.matcher, cpus)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine, for tests and benchmarks that inspect or replace them."""

    scheduler: Scheduler
    executor: "DeviceExecutor"
    loaded: "LoadedModel"
    host_adapters: "HostAdapters"
    # None if the kernels read the arena itself, or if no profile could be measured.
    coexecution: "Coexecution | None"
    grammars: Grammars


class EngineAssembly:
    """An assembled engine."""

    def __init__(
        self,
        core: EngineCore,
        info: ModelInfo,
        adapters: AdapterManager,
        close: Callable[[], None],
        parts: EngineParts,
        background_cpus: tuple[int, ...] = (),
    ) -> None:
        self.core = core
        self.info = info
        self.adapters = adapters
        self.parts = parts
        self.grammars = parts.grammars
        self.tokenizer: TokenizerSpec | None = None
        self._close = close
        self._background_cpus = background_cpus

    def begin(self) -> None:
        """Begin what an engine does beside its first steps."""
        self.grammars.start()
        late = self.parts.loaded.weights.late
        if late is not None:
            late.begin(lambda: self.core.has_work, self._background_cpus)

    def publish_to(self, heartbeat: Heartbeat) -> None:
        """Publish the layers and compilations of this thread there, until ``close``."""
        from ....gpu.execution.compilation import compilation_published

        self.parts.loaded.context.progress = heartbeat
        undo = contextlib.ExitStack()
        undo.callback(self._close)
        undo.enter_context(compilation_published(heartbeat))
        self._close = undo.close

    def close(self) -> None:
        """Stop the threads and free the memory. Idempotent."""
        self._close()


def build_engine(
    config: EngineConfig,
    *,
    on_progress: Callable[[str], None],
    own_process: bool,
    own_policies: OwnPolicies | None = None,
) -> EngineAssembly:
    """Load model and adapters, and connect all parts.

    Args:
        config: The options.
        on_progress: Called with each step of the start, as text.
        own_process: Whether the front end is in another process, so that settings of this
            process (threads, garbage collector) can be changed.
        own_policies: Take precedence over those that ``config`` names.

    Raises:
        CorunError: The engine cannot start.
    """
    config = with_demo(config)
    if config.load_strategy in SIMULATED_BASELINES:
        raise ConfigError(f"--load-strategy is {config.load_strategy!r}, which only corun simulate has")
    on_progress("importing torch, transformers and numba")
    with contextlib.ExitStack() as undo:
        if own_process:
            begin_pages_ahead(weights_ahead_bytes(config, read_machine_facts().memory_available_bytes))
            undo.callback(end_pages_ahead)
        with _imports(own_process=own_process):
            if own_process:
                import_numba()
            from ....gpu.execution.compilation import compilation_reported
            from ....gpu.without_compiler import without_compiler

        assert config.model is not None
        left_out = optional_packages(config.model)
        alone = without_compiler(kept_directory(), left_out) if own_process else contextlib.nullcontext()
        with compilation_reported(on_progress) as begin_stage, alone:
            built = _build(config, begin_stage, own_policies, own_process=own_process)
    if own_process:
        keep_living()
        give_back_unused()
    return built


@contextlib.contextmanager
def _imports(*, own_process: bool) -> Iterator[None]:
    """Disable the garbage collector inside the block, if the process is the engine's own."""
    if not own_process:
        yield
        return
    with collection_paused():
        yield
    keep_imported()


def _build(
    config: EngineConfig,
    on_progress: Callable[[str], None],
    own_policies: OwnPolicies | None,
    *,
    own_process: bool,
) -> EngineAssembly:
    assert config.model is not None
    remove_stale_names()
    with _imports(own_process=own_process):
        from ....gpu.execution import assemble, start_probe
        from ....gpu.model.source import ModelSource, load_config

    warn_of_what_is_not_kept()
    facts = read_machine_facts()
    placement = place_engine(config, facts)
    FILES.place(placement.background_cpus)
    owns_torch = _limit_threads(config, placement.machine.num_threads, own_process=own_process)
    source = ModelSource(config.model, config.revision, config.trust_remote_code)
    # Refuse invalid options before the weights are read, which takes long.
    hf_config = load_config(source)
    if config.max_model_len is not None:
        max_model_len_of(config, hf_config.get_text_config(), exact_limit=None)
    adapters = collect_sources(config.lora_dir, config.lora_modules, base_names(config))
    on_progress("reading the tokenizer")
    tokenizer = read_tokenizer(
        config.model,
        int(hf_config.get_text_config().vocab_size),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    loaded = assemble.load(source, config, on_progress, placement.background_cpus, kept_directory())
    end_pages_ahead()  # before free memory is divided
    try:
        on_progress("comparing logits with transformers, or reading the kept verdict (parity probe)")
        may_choose = own_process and config.cpu_threads is None
        loaded = start_probe.probe(
            loaded,
            config,
            kept=kept_directory(),
            max_threads=placement.machine.num_threads if may_choose else None,
            owns_torch=owns_torch,
        )
        measured = _measured(config, loaded, placement, facts, on_progress)
        assembly = _connect(
            config,
            _Given(source, tokenizer, adapters),
            loaded,
            on_progress,
            placement,
            measured,
            own_policies,
        )
    except BaseException:
        loaded.close()
        raise
    assembly.tokenizer = tokenizer.spec
    return assembly


def _limit_threads(config: EngineConfig, most_threads: int, *, own_process: bool) -> bool:
    """Set the threads of torch and of the kernels; whether torch's belong to the engine.

    torch's threads belong to the whole process. A pinned engine with more threads than cores would
    wait at every barrier, so cores limit threads, even in another program's process.
    """
    from ....gpu.execution.threads import set_threads
    from ....gpu.forward.kernel_threads import set_kernel_threads

    num_threads = config.cpu_threads or most_threads
    owns_torch = own_process or config.cpu_threads is not None or config.engine_cores is not None
    if owns_torch:
        set_threads(num_threads)
    set_kernel_threads(num_threads)
    return owns_torch


@dataclass(frozen=True, slots=True)
class _Given:
    """The adapters and tokenizer that the options name."""

    source: "ModelSource"
    tokenizer: ModelTokenizer
    adapters: Sequence[LoraModule]

    @property
    def tokens(self) -> BaseTokens:
        return self.tokenizer.tokens


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measurements of the machine, as far as they exist."""

    profile: "Profile | None"  # for co-execution
    model: "MachineModel | None"  # of steps, also without co-execution


def _measured(
    config: EngineConfig,
    loaded: "LoadedModel",
    placement: Placement,
    facts: MachineFacts,
    on_progress: Callable[[str], None],
) -> _Measured:
    from .profiling import profile_for, saved_profile

    if not loaded.target_map.inside:  # a profile needs adapters
        _LOG.warning("adapters cannot target any module of %s: only the base model is served", config.model)
        return _Measured(None, None)
    if not copies_adapters(config, loaded):
        saved = saved_profile(config, loaded, placement, facts)
        return _Measured(None, None if saved is None else saved.model)
    profile = profile_for(config, loaded, placement, facts, on_progress)
    return _Measured(profile, None if profile is None else profile.model)


def _make_core(
    config: EngineConfig,
    fingerprint: str,
    loaded: "LoadedModel",
    measured: _Measured,
    scheduler: Scheduler,
    executor: "DeviceExecutor",
    manager: AdapterManager,
    coexecution: "Coexecution | None",
) -> EngineCore:
    settings = CoreConfig(
        base_fingerprint=fingerprint,
        dtype=str(loaded.dtype),
        machine=measured.model,
        log_slow_s=config.log_slow_s,
    )
    return EngineCore(
        scheduler,
        executor,
        manager,
        settings,
        clock=time.monotonic,
        on_adapter_gone=manager.remove_version,
        cpu=partial(cpu_stats, loaded.threads, None if coexecution is None else coexecution.worker_stats),
    )


def _connect(
    config: EngineConfig,
    given: _Given,
    loaded: "LoadedModel",
    on_progress: Callable[[str], None],
    placement: Placement,
    measured: _Measured,
    own_policies: OwnPolicies | None,
) -> EngineAssembly:
    """Plan the memory, make core and executor, and register the adapters."""
    from ....gpu.execution import assemble
    from ....gpu.model.fingerprint import model_fingerprint
    from ....gpu.model.generation import read_generation_defaults

    memory, arena = plan_engine_memory(config, loaded, read_machine_facts(), given.adapters)
    runner = assemble.make_runner(loaded, memory.num_pages or memory.num_blocks)
    defaults = read_generation_defaults(given.source, loaded.config, given.tokens.eos_token_id)
    fingerprint = model_fingerprint(given.source, loaded.config, loaded.weights.label)
    profile, cpus = measured.profile, placement.background_cpus
    fill_cpus = _fill_cpus(loaded, placement, arena, on_progress)
    with contextlib.ExitStack() as undo:
        undo.callback(loaded.close)
        has_pages = memory.num_pages is not None
        pages = assemble.device_pages(runner, config.max_lora_rank) if has_pages else None
        host = make_host_adapters(config, loaded, arena, pages, profile, fill_cpus)
        undo.callback(host.close)
        manager = make_manager(config, host, given.tokens, cpus)
        undo.callback(manager.close)
        host_kv = _host_kv(loaded, memory, cpus, fill_cpus, undo)
        coexecution = _coexecution(config, loaded, host, placement, profile, on_progress, host_kv)
        if coexecution is not None:
            undo.callback(coexecution.close)
        grammars = make_grammars(given.tokenizer, loaded.config, defaults, manager.notify, cpus)
        undo.callback(grammars.close)
        assemble.warm_up_kernels(loaded, runner, memory.max_model_len, on_progress)
        fetch, sampler = adapter_fetch(host, manager, cpus), make_sampler(grammars, defaults, cpus)
        executor = assemble.make_executor(
            loaded,
            runner,
            fetch,
            sampler,
            max_model_len=memory.max_model_len,
            assistant=None if coexecution is None else coexecution.assistant,
            host_kv=host_kv,
        )
        undo.callback(executor.close)
        host_cache, eos_token_ids = _host_cache(arena, host), defaults.eos_token_ids
        scheduler = make_scheduler(
            config, loaded, memory, host_cache, eos_token_ids, coexecution, own_policies, measured.model
        )
        core = _make_core(config, fingerprint, loaded, measured, scheduler, executor, manager, coexecution)
        manager.attach(core)
        if loaded.model.device.type != "cuda":
            undo.callback(watch_memory(scheduler.memory.relief, manager.notify, cpus))
        register_adapters(config, manager, given.adapters, on_progress, cpus)
        info = _model_info(config, loaded, memory, defaults, profile, fingerprint)
        lines = summary_lines(info, manager.infos(), loaded.backend_names, placement.line)
        parts = EngineParts(scheduler, executor, loaded, host, coexecution, grammars)
        info = msgspec.structs.replace(info, summary=lines)
        return EngineAssembly(core, info, manager, undo.pop_all().close, parts, cpus)


def _fill_cpus(
    loaded: "LoadedModel", placement: Placement, arena: ArenaPlan, on_progress: Callable[[str], None]
) -> tuple[int, ...]:
    """Report the host memory that CUDA pins; return the CPUs of threads that allocate it before."""
    if loaded.model.device.type != "cuda":
        return ()
    on_progress(f"pinning {arena.num_bytes / _GIB:.3g} GiB of host memory (--host-bytes)")
    return placement.plan.worker_cpus  # near the device, and idle until workers start


def _coexecution(
    config: EngineConfig,
    loaded: "LoadedModel",
    host: "HostAdapters",
    placement: Placement,
    profile: "Profile | None",
    on_progress: Callable[[str], None],
    host_kv: "HostKv | None",
) -> "Coexecution | None":
    """Start co-execution if adapters are copied to the device."""
    if not copies_adapters(config, loaded):
        return None
    from .coexecution import start_coexecution

    return start_coexecution(config, loaded, host, placement, profile, on_progress, host_kv)


def _host_kv(
    loaded: "LoadedModel",
    memory: MemoryPlan,
    cpus: tuple[int, ...],
    fill_cpus: tuple[int, ...],
    undo: contextlib.ExitStack,
) -> "HostKv | None":
    """Allocate KV on the host, before the device's first operation; ``undo`` closes it."""
    sections = memory.host_sections
    if sections is None:
        return None
    from ....gpu.kv.host import HostKv

    host_kv = HostKv(loaded.device, sections, loaded.layout.block_bytes, watch_cpus=cpus, fill_cpus=fill_cpus)
    undo.callback(host_kv.close)
    return host_kv


def _host_cache(plan: ArenaPlan, host: "HostAdapters") -> HostCache:
    return HostCache(
        host.arena.capacity_bytes, is_device_memory=plan.idle_bytes is not None, idle_bytes=plan.idle_bytes
    )


def _model_info(
    config: EngineConfig,
    loaded: "LoadedModel",
    memory: MemoryPlan,
    defaults: "GenerationDefaults",
    profile: "Profile | None",
    fingerprint: str,
) -> ModelInfo:
    assert config.model is not None
    sections = memory.host_sections
    return ModelInfo(
        name=model_name(config),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.model.device),
        max_model_len=memory.max_model_len,
        max_num_batched_tokens=loaded.max_step_tokens,
        vocab_size=int(loaded.config.vocab_size),
        eos_token_ids=defaults.eos_token_ids,
        base_fingerprint=fingerprint,
        default_sampling=defaults.sampling,
        kv_capacity_tokens=memory.num_blocks * config.block_size,
        host_kv_tokens=0
        if sections is None
        else (sections.num_slots - sections.slots_per_section) * config.block_size,
        memory_bytes=memory.capacity_bytes,
        context_bytes=blocks_for(memory.max_model_len, config.block_size) * loaded.layout.block_bytes,
        adapter_memory_bytes=memory.adapter_limit_bytes,
        max_num_waiting=config.max_num_waiting,
        max_queue_s=config.max_queue_s,
        model_path=config.model,
        device_choices=dataclasses.asdict(loaded.device.choices),
        backends=loaded.backend_names,
        summary=(),
        has_profile_failed=profile is None
        and bool(loaded.target_map.inside)
        and copies_adapters(config, loaded),
        weight_bytes=loaded.weights.num_bytes,
        quantized_bytes=loaded.weights.quantized_bytes,
        adapter_bytes_per_rank=loaded.dtype.itemsize
        * sum(target.in_features + target.out_features for target in loaded.target_map.inside),
    )
