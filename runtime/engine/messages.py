"""The whole protocol between a front end and an engine.

Structs of msgspec, tagged by class name, as MessagePack over a socket pair. The front end chooses
request and operation ids. Every request gets exactly one final ``RequestUpdate`` (the one with a
``finish_reason``) in any case; every operation gets exactly one ``OperationDone``.
"""

import msgspec

from ...profiles.models import MachineModel
from ..adapters.info import AdapterInfo
from ..engine_state import EngineLoadState
from ..sampling import SamplingParams
from ..scheduler.events import RequestUpdate


class EngineMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


# Front end -> engine.


class AddRequest(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens for one prompt (a request with n choices is n of these)."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams  # n is 1, seed and max_tokens are set
    adapter_name: str | None = None  # None = the base model
    cache_salt: str = ""
    predicted_output_tokens: int | None = None  # None = the engine predicts
    name: str = ""  # the caller's id of it, for the log
    conventions: str | None = None  # digest of those that made the prompt; None = any
    waited_s: float = 0.0  # for its adapter's files, before it was sent


class AddRequests(EngineMessage, frozen=True):
    """Requests that begin together: no step is planned before the engine has them all."""

    requests: tuple[AddRequest, ...]


class AbortRequests(EngineMessage, frozen=True):
    """Stop computing; the final updates say "abort". Unknown ids are ignored."""

    request_ids: tuple[int, ...]


class AddAdapter(EngineMessage, frozen=True):
    """Register the PEFT directory ``path`` under ``name``.

    A known name gets a new version; without ``replaces``, different content is refused.
    """

    operation_id: int
    name: str
    path: str
    pinned: bool | None = None  # None = unchanged
    replaces: bool = True


class ReadAdapter(EngineMessage, frozen=True):
    """Read the files of ``name``, unless they have been read."""

    operation_id: int
    name: str


class PinAdapter(EngineMessage, frozen=True):
    """Pin all versions of ``name`` to the device, or unpin them."""

    operation_id: int
    name: str
    pinned: bool


class RemoveAdapter(EngineMessage, frozen=True):
    """Unregister ``name``; its memory is freed once its running requests have ended."""

    operation_id: int
    name: str


class ReportStats(EngineMessage, frozen=True):
    """Send statistics with the next turn, even if nothing has changed."""


class ReportMachine(EngineMessage, frozen=True):
    """Send the machine's latency model with the next turn."""


class Shutdown(EngineMessage, frozen=True):
    """End the engine process; open requests get an error."""


AdapterOperation = AddAdapter | ReadAdapter | PinAdapter | RemoveAdapter
ToEngine = AddRequests | AbortRequests | AdapterOperation | ReportStats | ReportMachine | Shutdown


# Engine -> front end.


class StartupProgress(EngineMessage, frozen=True):
    """What the engine does before it is ready."""

    text: str


class StartupFailed(EngineMessage, frozen=True):
    """The engine cannot start and exits. ``kind`` is the name of a class in ``errors``."""

    kind: str
    error: str


class ModelInfo(msgspec.Struct, frozen=True, array_like=True):
    """Facts about an engine that is ready, for the front end."""

    name: str
    dtype: str
    device: str
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]  # from generation_config.json
    kv_capacity_tokens: int  # on the device
    memory_bytes: int  # KV and adapters together
    max_num_waiting: int
    model_path: str  # directory or hub id of the model and its tokenizer
    device_choices: dict[str, str]  # sync and link: the device's mechanisms
    backends: dict[str, str]  # by operation (attention, LoRA and so on)
    summary: tuple[str, ...]  # lines for the log
    adapter_memory_bytes: int | None = None  # of these for adapters alone; None = shared with KV
    host_kv_tokens: int = 0  # the most that the host keeps
    context_bytes: int = 0  # KV of one request with a full context
    max_queue_s: float | None = None  # longest wait for the first step; None = no limit
    # Measuring failed at start: no co-execution, requests wait for their adapters.
    has_profile_failed: bool = False
    base_fingerprint: str = ""  # names the base model and its revision
    adapter_bytes_per_rank: int = 0  # of an adapter on all targets, on the device
    weight_bytes: int = 0  # of the base model in memory
    quantized_bytes: int = 0  # of these, of linears in 8 or 4 bits


class MachineReport(EngineMessage, frozen=True):
    """The latency model of the engine's machine."""

    machine: MachineModel
    file_bytes_per_s: float  # when reading adapters
    kv_bytes_per_token: int
    is_measured: bool = True  # False = learned from steps so far


class TokenizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tokenizer that can be made with the ``tokenizers`` package alone."""

    backend: str  # its JSON
    special_tokens: dict[str, str]  # by their names in chat templates, such as bos_token
    chat_template: str | dict[str, str] | None  # one, or several by name
    response_template: str | None = None  # JSON


class Ready(EngineMessage, frozen=True):
    """The engine is ready."""

    model: ModelInfo
    adapters: tuple[AdapterInfo, ...]
    machine: MachineReport
    tokenizer: TokenizerSpec | None = None  # None = the front end loads it with transformers


class CpuWorkerStats(msgspec.Struct, frozen=True, array_like=True):
    """The processes that compute LoRA deltas on CPU cores; all zero without them."""

    num_workers: int = 0  # planned
    num_ready: int = 0  # that accept work now
    num_restarts: int = 0
    num_failed_jobs: int = 0  # failed because their worker died


class ThreadStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's threads that compute on the CPU; all zero with an accelerator."""

    num_threads: int = 0  # that compute now
    ran_s: float = 0.0  # of all threads, since the start
    waited_s: float = 0.0  # runnable, without a core
    waited_share: float = 0.0  # of both, over at least the last 0.25 s of steps


class LinkUsage(msgspec.Struct, frozen=True, array_like=True):
    """Copies between host and device since the start."""

    direction: str  # a value of ``profiles.link.Direction``
    kind: str  # "adapter" or "kv"
    num_bytes: int
    busy_s: float  # with a copy under way


class LoadStats(msgspec.Struct, frozen=True, array_like=True):
    """Loads of adapters since the start."""

    num_loads: int
    duration_s: float


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges and running totals of the engine since its start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    preemptions: dict[str, int] = {}  # by cause, a value of ``scheduler.events.PreemptionCause``
    num_steps: int = 0
    num_failed_steps: int = 0
    prompt_tokens_computed: int = 0
    generated_tokens: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    cpu_workers: CpuWorkerStats = CpuWorkerStats()
    threads: ThreadStats = ThreadStats()
    num_retried_rows: int = 0
    cold_starts: dict[str, int] = {}  # requests without their adapter on the device, by strategy
    adapter_evictions: dict[str, dict[str, int]] = {}  # by level, "device" or "host", and reason
    adapter_loads: dict[str, LoadStats] = {}  # by transition
    adapter_room_bytes: int = 0  # for all adapters, beside the KV of running requests
    invalid_kv_bytes: int = 0  # on the device without its adapter
    prompt_tokens_cached: int = 0  # found on the device, so not among the computed ones
    prompt_tokens_host_cached: int = 0  # copied from the host, so not computed either
    memory_bytes: dict[str, dict[str, int]] = {}  # by level, "device" or "host", and kind
    link: tuple[LinkUsage, ...] = ()
    policy_counts: dict[str, float] = {}  # gauges of the scheduling policy
    first_token_parts_s: dict[str, float] = {}  # sums over requests, by part
    num_deferred: int = 0  # of waiting requests, for anything but memory and slots
    steps_by_tokens: dict[int, int] = {}  # by their tokens, rounded up to a power of two
    num_step_tokens: int = 0  # of all of them
    load: EngineLoadState | None = None  # None = not published yet
    is_memory_short: bool = False  # of the machine: idle KV and adapters are evicted
    relieved_bytes: int = 0  # of these evictions so far
    num_loads_without_run: int = 0  # enough pages were free, but too few adjacent ones
    num_extents_evicted: int = 0  # groups of pages, for such loads
    decode_gap_bound_s: float = 0.0  # of the last step that had one
    num_unreadable_adapters: int = 0  # entries of --lora-dir that cannot be read
    lora_dir_unseen_s: int = 0  # since --lora-dir was looked at last, if that is 30 s or more

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that requests hold."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0

    @property
    def num_preemptions(self) -> int:
        return sum(self.preemptions.values())

    @property
    def num_device_evictions(self) -> int:
        """Evictions of adapters from the device, for all reasons."""
        return sum(self.adapter_evictions.get("device", {}).values())


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load at a turn of the loop, for routers."""

    num_waiting: int = 0
    num_running: int = 0
    kv_blocks_used: int = 0


class StepOutputs(EngineMessage, frozen=True):
    """All updates of requests of one turn of the loop."""

    updates: tuple[RequestUpdate, ...]
    num_requests: int = 0  # received so far, including refused ones; the load includes them
    load: EngineLoad = EngineLoad()
    # None = as published before, or not published yet, for 0.1 s at most.
    stats: EngineStats | None = None


class AdaptersChanged(EngineMessage, frozen=True):
    """Adapters that have changed since they were published last."""

    adapters: tuple[AdapterInfo, ...]
    removed: tuple[str, ...] = ()  # names without an adapter


class OperationDone(EngineMessage, frozen=True):
    """The result of an adapter operation; ``error`` is None if it succeeded."""

    operation_id: int
    error: str | None = None
    error_kind: str | None = None


FromEngine = (
    StartupProgress | StartupFailed | Ready | StepOutputs | AdaptersChanged | OperationDone | MachineReport
)
