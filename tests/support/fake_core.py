"""Core and adapters of an engine process without a model; a tokenizer with bytes as token ids.

The fake answers a prompt with its own bytes (an adapter upper-cases them), then the end token. The
beginning of a prompt may cause failures: see ``FakeCore``.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from corun.runtime.adapters.conventions import NO_CONVENTIONS
from corun.runtime.adapters.dir_changes import WatchState
from corun.runtime.adapters.info import AdapterInfo
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.heartbeat import Heartbeat
from corun.runtime.engine.messages import (
    AdapterOperation,
    AdaptersChanged,
    AddRequest,
    EngineLoad,
    EngineStats,
    MachineReport,
    ModelInfo,
    OperationDone,
    PinAdapter,
    ReadAdapter,
    RemoveAdapter,
    TokenizerSpec,
)
from corun.runtime.engine_state import Residency
from corun.runtime.errors import (
    AdapterError,
    EngineDeadError,
    ModelError,
    OverloadedError,
    RequestError,
    UnknownModelError,
)
from corun.runtime.plan import RequestId, TokenLogprobs
from corun.runtime.sampling import StructuredOutput
from corun.runtime.scheduler.events import RequestUpdate, TimeParts
from corun.runtime.scheduler.step_times import LearnedTimes

FACTORY = "support.fake_core:build"
TELLING_FACTORY = "support.fake_core:build_telling"
BOS_ID, EOS_ID = 256, 257
VOCAB_SIZE = 260  # two more than the tokenizer knows: models pad their vocabulary
MAX_MODEL_LEN = 4096

MACHINE = MachineReport(LearnedTimes(1).machine_model(), 1e8, 64, is_measured=False)
TIMING = TimeParts({"kv_memory": 0.5}, {}, 7)  # of requests that are aborted or fail
SILENT = "SILENT"  # the request never gets a token
CRASH = "CRASH"  # the next step raises: the engine ends
DIE = "DIE"  # the next step finds its device lost, and so does closing the engine
FAIL = "FAIL"  # the request fails, the engine goes on
LONG = "LONG"  # the duration of a slow step
LONG_STEP_S = 2.0
STUCK = "STUCK"  # its step does not return before ``UNSTUCK``, as if a kernel did not
UNSTUCK = threading.Event()
LAYERS = "LAYERS"  # the step is slow, and its layers are not
NUM_LAYERS = 15
LAYER_S = 0.1
COPYING = "COPYING"  # a copy for the request never ends

FAILING_MODEL = "model-that-cannot-be-loaded"
BROKEN_MODEL = "model-that-shows-a-bug"
SLOW_MODEL = "model-that-loads-for-ever"
SILENT_MODEL = "one that loads without a word"
SILENT_S = 1.0


class FakeCore:
    """One token per request and step."""

    def __init__(self, config: EngineConfig, adapter_names: dict[str, str]) -> None:
        self._config = config
        self._adapter_names = adapter_names
        self._open: dict[int, AddRequest] = {}
        self._num_generated: dict[int, int] = {}
        self._updates: list[RequestUpdate] = []
        self._num_steps = 0
        self._has_changes = False  # cleared by a step that finds nothing to do
        self._fd = os.eventfd(0)
        self.seeds: list[int | None] = []
        self.held: tuple[AddRequest, ...] = ()  # at the last request of statistics
        self.is_lost = False
        self.heartbeat = Heartbeat()

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(len(self._open), len(self._open), 2 * len(self._open))

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._updates)

    @property
    def is_ready(self) -> bool:
        return self._has_changes

    @property
    def num_advances(self) -> int:
        return self._num_steps

    @property
    def awaits_device(self) -> bool:
        return any(_text(request).startswith(COPYING) for request in self._open.values())

    def wake_at_s(self) -> float | None:
        return None

    def add_request(self, message: AddRequest, arrival_s: float | None = None) -> None:
        if len(self._open) >= self._config.max_num_waiting:
            raise OverloadedError(
                f"{len(self._open)} requests wait, "
                f"at most {self._config.max_num_waiting} may (--max-num-waiting)"
            )
        if message.adapter_name not in {None, *self._adapter_names}:
            raise UnknownModelError(f"no adapter is named {message.adapter_name!r}")
        self.seeds.append(message.sampling.seed)
        self._open[message.request_id] = message
        self._num_generated[message.request_id] = 0
        self._has_changes = True

    def abort(self, request_ids: Sequence[int]) -> None:
        self._has_changes = True
        for request_id in request_ids:
            if self._open.pop(request_id, None) is not None:
                self._updates.append(
                    RequestUpdate(
                        RequestId(request_id), finish_reason="abort", num_preemptions=3, timing=TIMING
                    )
                )

    def step(self) -> list[RequestUpdate]:
        updates, self._updates = self._updates, []
        self._has_changes = any(map(self._computes, self._open.values()))
        self._num_steps += self._has_changes
        for request in tuple(self._open.values()):
            if self._computes(request):
                updates.append(self._advance(request))
        return updates

    def stats(self, held: Iterable[AddRequest] = ()) -> EngineStats:
        self.held = tuple(held)
        return EngineStats(
            num_running=len(self._open),
            kv_blocks_used=2 * len(self._open),
            num_waiting=len(self._open),
            num_steps=self._num_steps,
        )

    def machine(self) -> MachineReport:
        return MACHINE

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def _computes(self, request: AddRequest) -> bool:
        return not _text(request).startswith((SILENT, COPYING))

    def _advance(self, request: AddRequest) -> RequestUpdate:
        text = _text(request)
        if text.startswith(CRASH):
            raise RuntimeError("the step was told to crash")
        if text.startswith(LONG):
            time.sleep(LONG_STEP_S)
        if text.startswith(LAYERS):
            for layer in range(NUM_LAYERS):
                self.heartbeat.begin_layer(layer)
                time.sleep(LAYER_S)
        if text.startswith(STUCK):
            UNSTUCK.wait()
        if text.startswith(DIE):
            self.is_lost = True
            raise EngineDeadError("the device is lost")
        if text.startswith(FAIL):
            del self._open[request.request_id]
            return RequestUpdate(
                RequestId(request.request_id),
                finish_reason="error",
                timing=TIMING,
                error_kind="StepFailedError",
                error="not a number in the logits",
            )
        token_id = self._next_token(request)
        self._num_generated[request.request_id] += 1
        reason = self._finish_reason(request, token_id)
        if reason is not None:
            del self._open[request.request_id]
        return RequestUpdate(
            RequestId(request.request_id),
            (token_id,),
            self._logprobs(request, token_id),
            reason,
            token_id if reason == "stop" else None,
        )

    def _next_token(self, request: AddRequest) -> int:
        answer = [token for token in request.prompt_token_ids if token < BOS_ID]
        if request.adapter_name is not None:
            answer = list(bytes(answer).upper())
        position = self._num_generated[request.request_id]
        if request.sampling.ignore_eos:
            return answer[position % len(answer)]
        return [*answer, EOS_ID][position]

    def _finish_reason(self, request: AddRequest, token_id: int) -> str | None:
        if token_id == EOS_ID or token_id in request.sampling.stop_token_ids:
            return "stop"
        num_tokens = self._num_generated[request.request_id]
        return "length" if num_tokens == request.sampling.max_tokens else None

    def _logprobs(self, request: AddRequest, token_id: int) -> tuple[TokenLogprobs, ...] | None:
        num_top = request.sampling.logprobs
        if num_top is None:
            return None
        top = tuple(range(token_id, token_id + num_top))
        return (TokenLogprobs(-0.5, 1, top, tuple(-0.5 - rank for rank in range(num_top))),)


def _text(request: AddRequest) -> str:
    """The prompt as far as it is text; special tokens are dropped."""
    return bytes(t for t in request.prompt_token_ids if t < BOS_ID).decode("latin-1")


class FakeAdapters:
    """Accepts every directory that exists."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.pinned: dict[str, bool] = {}
        self.unread: set[str] = set()  # names with files that are being read
        self._messages: list[OperationDone | AdaptersChanged] = []
        self._num_versions = 0
        self._fd = os.eventfd(0)

    def handle(self, message: AdapterOperation) -> None:
        removed: tuple[str, ...] = ()
        if isinstance(message, RemoveAdapter):
            if message.name not in self.paths:
                raise UnknownModelError(f"no adapter is named {message.name!r}")
            del self.paths[message.name]
            removed = (message.name,)
        elif isinstance(message, PinAdapter):
            self.pinned[message.name] = message.pinned
        elif isinstance(message, ReadAdapter):
            assert message.name in self.paths
        elif not Path(message.path).is_dir():
            error = f"{message.path} is no directory"
            done = OperationDone(message.operation_id, error, AdapterError.__name__)
            self._messages.append(done)
            return
        else:
            self._num_versions += 1
            self.paths[message.name] = message.path
            if message.pinned is not None:
                self.pinned[message.name] = message.pinned
        done = OperationDone(message.operation_id)
        self._messages += [AdaptersChanged(self.infos(), removed), done]

    @property
    def watch_state(self) -> WatchState:
        return WatchState()

    def must_wait(self, name: str) -> bool:
        return name in self.unread

    def poll(self, *, is_due: bool) -> list[OperationDone | AdaptersChanged]:
        messages, self._messages = self._messages, []
        return messages

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(
            AdapterInfo(
                name,
                path,
                "ready",
                None,
                8,
                1024,
                str(self._num_versions),
                self.pinned.get(name, False),
                Residency(level="device"),
                conventions=NO_CONVENTIONS,
            )
            for name, path in self.paths.items()
        )

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class FakeGrammars:
    """Grammars that are compiled when a test says so; a fake core follows none."""

    def __init__(self) -> None:
        self.compiling: set[StructuredOutput] = set()
        self.error: RequestError | None = None

    def must_wait(self, structured: StructuredOutput) -> bool:
        return structured in self.compiling

    def check(self, structured: StructuredOutput) -> None:
        if self.error is not None:
            raise self.error


class FakeAssembly:
    """What the factory returns."""

    def __init__(self, config: EngineConfig) -> None:
        self.adapters = FakeAdapters()
        self.grammars = FakeGrammars()
        self.core = FakeCore(config, self.adapters.paths)
        self.info = msgspec.structs.replace(model_info(str(config.model)), max_queue_s=config.max_queue_s)
        self.tokenizer: TokenizerSpec | None = None
        self.num_closed = 0

    def begin(self) -> None:
        """Nothing runs beside the steps of a fake."""

    def publish_to(self, heartbeat: Heartbeat) -> None:
        self.core.heartbeat = heartbeat

    def close(self) -> None:
        self.num_closed += 1
        if self.core.is_lost:
            raise RuntimeError("the device answers nothing")
        if self.num_closed == 1:
            self.core.close()
            self.adapters.close()


def model_info(model_path: str) -> ModelInfo:
    """Return the facts of a small model."""
    return ModelInfo(
        name="fake",
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=512,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_ID,),
        default_sampling={},
        kv_capacity_tokens=1 << 16,
        memory_bytes=1 << 30,
        max_num_waiting=64,
        model_path=model_path,
        device_choices={},
        backends={},
        summary=("a fake",),
    )


def build(config: EngineConfig, *, on_progress: Callable[[str], None], own_process: bool) -> FakeAssembly:
    """The factory; ``config.model`` is the tokenizer's directory or the name of a failure."""
    on_progress("pretending to load")
    if config.model == FAILING_MODEL:
        raise ModelError(f"cannot load {config.model}")
    if config.model == BROKEN_MODEL:
        raise ZeroDivisionError("a bug while loading")
    if config.model == SILENT_MODEL:
        time.sleep(SILENT_S)
    while config.model == SLOW_MODEL:
        on_progress("still loading")
        time.sleep(0.001)
    return FakeAssembly(config)


def build_telling(
    config: EngineConfig, *, on_progress: Callable[[str], None], own_process: bool
) -> FakeAssembly:
    """A factory for an engine that reports its tokenizer, as in a process of its own."""
    from corun.runtime.engine.tokenizer import load_tokenizer, spec_of

    assembly = build(config, on_progress=on_progress, own_process=own_process)
    assembly.tokenizer = spec_of(load_tokenizer(str(config.model)))
    return assembly


def save_tokenizer(directory: Path, *, chat_template: str | None = None) -> str:
    """Save a byte-level tokenizer with the bytes as token ids; return its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )
    fast.save_pretrained(directory)
    return str(directory)


def _byte_vocabulary() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    return vocabulary | {chr(0x100 + index): byte for index, byte in enumerate(others)}
