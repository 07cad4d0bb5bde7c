"""``AsyncEngine``: concurrent requests on an event loop, over an engine in a thread or process.

Owns open requests and operations, and ends each of them with an error if the engine dies.
Knows nothing of HTTP, and of the engine only its client.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from ..adapters.info import AdapterInfo
from ..config.engine import EngineConfig
from ..engine.client import EngineClient, ProcessClient, ThreadClient
from ..engine.heartbeat import HangWatch
from ..engine.messages import (
    AdaptersChanged,
    EngineStats,
    FromEngine,
    MachineReport,
    ModelInfo,
    OperationDone,
    StepOutputs,
    TokenizerSpec,
)
from ..engine.tokenizer import load_tokenizer
from ..errors import AdapterChangedError, ConfigError, EngineDeadError
from ..limits import HubLimits, TemplateLimits
from ..sampling import SamplingParams
from ..tasks import cancel_all
from .adapter_conventions import AdapterTokenizers, Conventions, MakePrompt
from .codec import codec_from_spec, codec_of
from .engine_watch import EngineWatches, MachineClient, StatsClient, Waker
from .inputs import BatchItem, Lora, LoraDirectory, Prompt, default_sampling, read_options
from .lora_client import LoraClient
from .lora_resolvers import LoraResolver
from .outputs import LoRARequest, RequestOutput, RequestWatch
from .request_client import RequestClient
from .template_limits import render_in_time
from .tokenizer import TextQueue, Tokenizer


class AsyncEngine:
    """An engine on an event loop; its methods belong to the loop that first uses it.

    ``AsyncEngine(model=...)`` takes the fields of ``EngineConfig``, or one as ``config``. By
    default the engine computes in a thread of this process. With ``own_process=True`` it runs in a
    process of its own. In a thread, ``scheduling_policy`` may also be a callable that makes a
    ``SchedulerPolicy`` from ``PolicyFacts``, such as a class, and ``memory_policy`` one that makes
    a ``RankingPolicy`` from ``MemoryFacts``.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, own_process: bool = False, **options: Any
    ) -> None:
        config, own_policies = read_options(config, options)
        client: EngineClient
        if not own_process:
            client = ThreadClient(config, own_policies=own_policies)
        elif own_policies is None:
            client = ProcessClient(config)
        else:
            text = f"{own_policies} cannot be sent to another process: with own_process=True"
            raise ConfigError(f"{text} each policy must be a name")
        self._set_up(client, {}, None)

    @classmethod
    def from_client(
        cls,
        client: EngineClient,
        *,
        chat_template: str | None = None,
        response_template: str | None = None,
        hub_limits: HubLimits | None = None,
    ) -> Self:
        """Use ``client``, not yet started; the templates replace the model's own."""
        engine = cls.__new__(cls)
        templates = {"chat_template": chat_template, "response_template": response_template}
        engine._set_up(client, templates, hub_limits)
        return engine

    def _set_up(
        self, client: EngineClient, templates: Mapping[str, str | None], limits: HubLimits | None
    ) -> None:
        self._client = client
        self._templates = templates
        self._stats = StatsClient(client)
        self._machine = MachineClient(client)
        self.watches = EngineWatches()  # notified of what the engine publishes
        self._requests = RequestClient(client)
        self._loras = LoraClient(client, hub_limits=limits)
        self._model: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._tokenizers: AdapterTokenizers | None = None
        self._hf: Any = None  # the tokenizer of transformers, once needed
        self._starting: asyncio.Task[None] | None = None
        self._error: EngineDeadError | None = None
        self._dead = asyncio.Event()

    # Start and end.

    async def start(self) -> None:
        """Start the engine and wait until it is ready; ``generate`` does this too if needed.

        Raises ``ConfigError``, ``ModelError``, ``ResourceError`` or ``EngineDeadError``.
        """
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await asyncio.shield(self._starting)
        self._check_alive()

    async def _start(self) -> None:
        ready = await self._client.start(self._receive, self._die)
        self._loras.begin(ready.model.name, ready.adapters)
        self._model = ready.model
        self._machine.apply(ready.machine)
        self._tokenizer = await asyncio.to_thread(self._make_tokenizer, ready.tokenizer)
        self._tokenizers = AdapterTokenizers(self._tokenizer, self._loras, ready.model)
        self._requests.begin(ready.model, self._tokenizer)

    def _make_tokenizer(self, spec: TokenizerSpec | None) -> Tokenizer:
        queue = TextQueue(self._client.config.max_waiting_chars)
        if spec is not None:
            return Tokenizer(codec_from_spec(spec, **self._templates), queue)
        return Tokenizer(codec_of(self.get_tokenizer(), **self._templates), queue)

    async def shutdown(self) -> None:
        """End the engine; open requests fail with ``EngineDeadError``. Idempotent."""
        self._die(EngineDeadError("the engine was shut down"))
        if self._starting is not None and not self._starting.done():
            await cancel_all(self._starting)
        await self._client.close()
        await self._requests.end()
        if self._tokenizer is not None:
            self._tokenizer.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    @property
    def error(self) -> EngineDeadError | None:
        """The reason of the engine's death; None while it is alive."""
        return self._error

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine has died or was shut down; return the reason."""
        await self._dead.wait()
        assert self._error is not None
        return self._error

    # Facts.

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with the chat template."""
        assert self._tokenizer is not None, "the engine has not been started"
        return self._tokenizer

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers, loaded on first use."""
        if self._hf is None:
            config = self._client.config
            self._hf = load_tokenizer(
                self.get_model_info().model_path,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
            )
        return self._hf

    def get_model_info(self) -> ModelInfo:
        """Return the model's name, device and limits."""
        assert self._model is not None, "the engine has not been started"
        return self._model

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without sampling parameters."""
        return default_sampling(self.get_model_info())

    def get_stats(self) -> EngineStats:
        """Return the last published gauges and totals; a computing engine publishes each 0.1 s."""
        return self._stats.latest

    @property
    def stats_age_s(self) -> float:
        """Seconds since the engine last published gauges and changes of adapters."""
        return self._stats.age_s

    async def refresh_stats(self, timeout_s: float) -> EngineStats:
        """Return current gauges and totals, or those of ``get_stats`` after ``timeout_s``."""
        return await self._stats.refresh(timeout_s)

    def ask_stats(self) -> None:
        """Ask the engine to publish its gauges and totals soon."""
        self._stats.ask()

    async def refresh_machine(self, timeout_s: float) -> MachineReport:
        """Return the machine's latency model: measured, or learned until now or the last report."""
        return await self._machine.refresh_learned(timeout_s)

    @property
    def num_heartbeats(self) -> int:
        """Heartbeats of the engine's process so far, which continue during long steps."""
        return self._client.num_heartbeats

    @property
    def hang_watch(self) -> HangWatch:
        """Says whether the engine makes progress; see ``engine_hang_s``."""
        return self._client.hang_watch

    @property
    def num_requests_received(self) -> int:
        """Number of requests that the engine had received at its last statistics."""
        return self._stats.num_requests

    # Adapters.

    async def add_lora(
        self,
        lora_request: LoRARequest,
        *,
        reload: bool = False,
        pinned: bool | None = None,
        replace: bool = True,
    ) -> None:
        """Register an adapter; the same name with the same path is a no-op unless ``reload``.

        Another path makes a new version; running requests finish on the old one. Without
        ``replace``, different content raises ``AdapterExistsError``. ``pinned``: as for
        ``pin_lora``; None = unchanged. Raises ``AdapterError``, and ``RequestError`` if there is no
        room for another pinned adapter, or the name is being loaded.
        """
        await self.start()
        await self._loras.add(lora_request, reload=reload, pinned=pinned, replace=replace)

    async def pin_lora(self, lora_name: str, *, pinned: bool = True) -> None:
        """Load an adapter and its later versions to the device and keep them there, or unpin it.

        Raises ``UnknownModelError``, ``AdapterUnavailableError``, and ``RequestError`` if too
        little memory would be left for a request of the full context.
        """
        await self.start()
        await self._loras.pin(lora_name, pinned=pinned)

    async def remove_lora(self, lora_name: str) -> None:
        """Unregister an adapter; running requests finish. Raises ``UnknownModelError``."""
        await self.start()
        await self._loras.remove(lora_name)

    async def find_lora(self, lora_name: str) -> None:
        """Register the adapter that a resolver finds for a name. See ``LoraClient.find``."""
        await self.start()
        await self._loras.find(lora_name)

    def add_lora_resolver(self, resolver: LoraResolver) -> None:
        """Use ``resolver`` for unknown names, after the resolvers of the options."""
        self._loras.add_resolver(resolver)

    def list_loras(self) -> list[AdapterInfo]:
        """Return the registered adapters, by name."""
        return self.loras.list()

    @property
    def loras(self) -> LoraDirectory:
        """The known adapters, by name."""
        return self._loras.directory

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        lora_request: Lora = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation, by the adapter's template if it has one.

        The prompt contains the special tokens: generate with ``add_special_tokens=False``. Raises
        ``RequestError`` if the template refuses the messages or takes too long, and the errors of
        ``generate`` for adapters.
        """
        await self.start()
        await self._loras.resolve(lora_request)
        render = partial(
            (await self.conventions_of(lora_request)).apply_chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
        return await render_in_time(render, TemplateLimits())

    async def conventions_of(self, lora: Lora) -> Conventions:
        """Return an adapter's conventions, once its files have been read; None = the base."""
        assert self._tokenizers is not None, "the engine has not started"
        return await self._tokenizers.conventions_of(lora)

    # Requests.

    async def generate(
        self,
        prompt: Prompt | MakePrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Lora = None,
        cache_salt: str = "",
        predicted_output_tokens: int | None = None,
        add_special_tokens: bool = True,
        watch: RequestWatch | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's state whenever something is new; the last one is ``finished``.

        ``prompt`` is text, token ids, or a function that makes them by the adapter's conventions; a
        text that a chat template rendered needs ``add_special_tokens=False``. Without
        ``sampling_params`` the model's own defaults apply. ``lora_request`` may be a registered
        adapter's name. ``predicted_output_tokens``, the approximate length of each choice, helps
        the scheduler. Closing the generator aborts the request; ``watch`` is notified of its end in
        any case. Raises ``RequestError``, ``AdapterError``, ``EngineDeadError`` while an output is
        awaited.
        """
        await self.start()
        await self._loras.resolve(lora_request)
        waker = Waker()
        while True:
            prepared = await self._requests.prepare(
                prompt,
                sampling_params,
                request_id,
                lora_request,
                await self.conventions_of(lora_request),
                add_special_tokens,
                cache_salt,
                predicted_output_tokens,
            )
            generation = self._requests.open(prepared, lambda _: waker.set(), watch)
            self.watches.sent(generation.request_id, self._requests.num_sent)
            try:
                while True:
                    await waker
                    if generation.error is not None:
                        raise generation.error
                    output = generation.output()
                    yield output
                    if output.finished:
                        return
            except AdapterChangedError:  # before it began: make its prompt again
                continue
            finally:
                self._requests.close(generation)

    async def generate_batch(
        self,
        items: Sequence[BatchItem],
        *,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        predicted_output_tokens: int | None = None,
    ) -> list[RequestOutput]:
        """Return one finished output per item, for any number of items. See ``Engine.generate``."""
        await self.start()
        for lora in dict.fromkeys(item.lora_request for item in items):
            await self._loras.resolve(lora)
        while True:
            batch = []
            for item in items:
                batch.append(
                    await self._requests.prepare(
                        item.prompt,
                        item.sampling_params,
                        None,
                        item.lora_request,
                        await self.conventions_of(item.lora_request),
                        add_special_tokens,
                        cache_salt,
                        predicted_output_tokens,
                    )
                )
                await asyncio.sleep(0)  # lets running requests receive their tokens
            with contextlib.suppress(AdapterChangedError):  # before all was sent: try once more
                return await self._requests.complete(batch)

    async def abort(self, request_id: str) -> None:
        """End a request; its generator yields what there is, with finish reason "abort"."""
        self._requests.abort(request_id)

    # From the engine.

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                if message.stats is not None:
                    self._stats.apply_stats(message.stats, message.num_requests)
                    self.watches.changed()
                self._stats.apply_load(message.load)
                self._requests.apply(message)
            case OperationDone():
                self._loras.operation_done(message)
            case AdaptersChanged(adapters, removed):
                self._loras.directory.update(adapters, removed)
                self.watches.changed([*(one.name for one in adapters), *removed])
            case MachineReport():
                self._machine.apply(message)

    def _die(self, error: EngineDeadError) -> None:
        if self._error is None:
            self._error = error
            self._dead.set()
            self._loras.fail_all(error)
            self._requests.fail_all(error)
            for client in (self._stats, self._machine):
                client.stop_waiting()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
