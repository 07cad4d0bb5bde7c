"""``Engine``: the synchronous front end, a thin layer over ``AsyncEngine``.

The engine computes in a thread of this process, and an event loop in another thread waits for it.
Neither changes global state: no signal handlers, no logging, no torch settings. It works in a
notebook, under a running event loop, and for several threads at once, which share batches.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ..adapters.info import AdapterInfo
from ..config.engine import EngineConfig
from ..engine.client import ThreadClient
from ..engine.heartbeat import HangWatch
from ..engine.messages import EngineStats, ModelInfo
from ..engine.spawn import DEFAULT_FACTORY
from ..errors import EngineDeadError
from ..sampling import SamplingParams
from ..tasks import cancel_all
from .async_engine import AsyncEngine
from .inputs import Lora, Prompt, read_batch, read_options
from .lora_resolvers import LoraResolver
from .outputs import LoRARequest, RequestOutput

THREAD_PREFIX = "corun-"  # of the names of all threads of an engine

_Result = TypeVar("_Result")

_logger = logging.getLogger(__name__)


# Knows nothing of what runs on it. It changes no global state: no signal handlers, no asyncio
# policy, no other event loop.
class LoopThread:
    """Runs coroutines for any thread until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        # Its own executor can be ended at interpreter exit, when no thread can be started for it.
        self._pool = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix=f"{THREAD_PREFIX}front-end-helper"
        )
        self._loop.set_default_executor(self._pool)
        self._lock = threading.RLock()  # guards _is_closing: nothing runs after it is set
        self._is_closing = False
        # A daemon, so that an engine left open does not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}front-end", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run ``coroutine`` to its end and return its result; an interrupt cancels it.

        Raises ``EngineDeadError`` after ``close``, and if ``close`` comes before the result.
        """
        with self._lock:
            if self._is_closing:
                coroutine.close()
                raise EngineDeadError("the engine is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineDeadError("the engine is closed") from None
        finally:
            future.cancel()  # no effect if it has ended

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run ``last``, cancel all other tasks and end the thread. Idempotent.

        Waits for the end, unless it is called by a thread of an engine that drops the last
        reference: the end may be waiting for that thread.
        """
        with self._lock:
            if self._is_closing:
                last.close()
            else:
                self._is_closing = True
                asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        if not threading.current_thread().name.startswith(THREAD_PREFIX):
            self._thread.join()

    async def _end(self, last: Awaitable[None]) -> None:
        try:
            await last
        except Exception:
            _logger.exception("the engine has ended, but freeing its resources failed")
        await cancel_all(*(asyncio.all_tasks() - {asyncio.current_task()}))
        await self._loop.shutdown_asyncgens()
        await asyncio.sleep(0)  # lets transports that were just closed report it
        self._loop.stop()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_forever()
            self._pool.shutdown()


class Engine:
    """A model with its adapters, for programs that generate answers to lists of prompts.

    ``Engine(model=...)`` takes the fields of ``EngineConfig``, or one as ``config``.
    ``scheduling_policy`` may also be a callable that makes a ``SchedulerPolicy`` from
    ``PolicyFacts``, such as a class, and ``memory_policy`` one that makes a ``RankingPolicy`` from
    ``MemoryFacts``. Raises ``ConfigError``, ``ModelError`` or ``ResourceError``. Use it as a
    context manager or ``close`` it.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, factory: str = DEFAULT_FACTORY, **options: Any
    ) -> None:
        config, own_policies = read_options(config, options)
        client = ThreadClient(config, factory=factory, own_policies=own_policies)
        self._engine = AsyncEngine.from_client(client)
        self._thread = LoopThread()
        try:
            self._thread.run(self._engine.start())
        except BaseException:
            self._thread.close(self._engine.shutdown())
            raise
        # Closes an engine that was not closed. Registered after the client's own finalizer, which
        # ends its thread less gently: at interpreter exit the latest runs first.
        self._finalizer = weakref.finalize(self, _close, self._thread, self._engine, os.getpid())

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and all other resources; running requests fail. Idempotent."""
        self._finalizer()

    # Facts.

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers."""
        return self._engine.get_tokenizer()

    def get_model_info(self) -> ModelInfo:
        """Return the model's name, device and limits."""
        return self._engine.get_model_info()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without sampling parameters."""
        return self._engine.get_default_sampling_params()

    def get_stats(self) -> EngineStats:
        """Return the engine's latest gauges and totals."""
        return self._engine.get_stats()

    @property
    def stats_age_s(self) -> float:
        """Seconds since the engine last published gauges and changes of adapters."""
        return self._engine.stats_age_s

    @property
    def hang_watch(self) -> HangWatch:
        """Says whether the engine makes progress; see ``engine_hang_s``."""
        return self._engine.hang_watch

    # Adapters.

    def add_lora(
        self,
        lora_request: LoRARequest,
        *,
        reload: bool = False,
        pinned: bool | None = None,
        replace: bool = True,
    ) -> None:
        """Register an adapter; see ``AsyncEngine.add_lora``."""
        self._thread.run(self._engine.add_lora(lora_request, reload=reload, pinned=pinned, replace=replace))

    def pin_lora(self, lora_name: str, *, pinned: bool = True) -> None:
        """Load an adapter and its later versions to the device and keep them there, or unpin it.

        Raises ``UnknownModelError``, ``AdapterUnavailableError``, and ``RequestError`` if too
        little memory would be left for a request of the full context.
        """
        self._thread.run(self._engine.pin_lora(lora_name, pinned=pinned))

    def remove_lora(self, lora_name: str) -> None:
        """Unregister an adapter. Raises ``UnknownModelError``."""
        self._thread.run(self._engine.remove_lora(lora_name))

    def add_lora_resolver(self, resolver: LoraResolver) -> None:
        """Use ``resolver`` for unknown names; see ``AsyncEngine``."""
        self._engine.add_lora_resolver(resolver)

    def list_loras(self) -> list[AdapterInfo]:
        """Return the registered adapters, by name."""
        return self._engine.list_loras()

    # Requests.

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        lora_request: Lora = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation; see ``AsyncEngine.apply_chat_template``."""
        render = self._engine.apply_chat_template(
            messages,
            lora_request,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._thread.run(render)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Lora | Sequence[Lora] = None,
        *,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        predicted_output_tokens: int | None = None,
    ) -> list[RequestOutput]:
        """Return one finished output per prompt, in their order.

        A prompt is text or a list of token ids. ``sampling_params`` and ``lora_request`` are one
        for all or one per prompt; None means the model's own defaults and the base model.
        ``add_special_tokens``: add the model's special tokens to text prompts.
        ``predicted_output_tokens``, the approximate length of each output, helps the scheduler. All
        prompts are checked before any is computed. Raises ``RequestError`` or ``AdapterError``; if
        a request fails later, the other requests are aborted and its error is raised.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        items = read_batch(prompts, sampling_params, lora_request)
        batch = self._engine.generate_batch(
            items,
            add_special_tokens=add_special_tokens,
            cache_salt=cache_salt,
            predicted_output_tokens=predicted_output_tokens,
        )
        return self._thread.run(batch)


def _close(thread: LoopThread, engine: AsyncEngine, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has the engine's memory but not its threads
        thread.close(engine.shutdown())
