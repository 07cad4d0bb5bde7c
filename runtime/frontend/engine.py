"""``Engine``: the synchronous front end, computing in the caller's own thread.

It starts no thread, sets no signal handler and touches no logging: a step runs inside
``generate``, also in a notebook or under a running event loop. Calls from several threads take
turns.
"""

import contextlib
import itertools
import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from ..config.engine import EngineConfig
from ..engine.messages import AdapterInfo, AddAdapter, EngineStats, ModelInfo, RemoveAdapter
from ..engine.process import DEFAULT_FACTORY, load_factory
from ..errors import EngineDeadError
from ..sampling import SamplingParams
from .batch import BatchItem, read_batch
from .generation import Generation
from .inputs import (
    Asked,
    Prompt,
    check_prompt,
    default_sampling,
    engine_requests,
    make_config,
)
from .local_driver import LocalDriver
from .lora_directory import check_lora_request
from .outputs import LoRARequest, RequestOutput
from .tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


class Engine:
    """A model with its adapters, for programs that want answers to lists of prompts.

    ``Engine(model=...)`` takes the fields of ``EngineConfig``, or one as ``config``. Raises
    ``ConfigError``, ``ModelError`` or ``ResourceError``. Use it as a context manager or ``close``
    it.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        factory: str = DEFAULT_FACTORY,
        **options: Any,
    ) -> None:
        self._config = make_config(config, options)
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._rng = random.Random(self._config.seed)  # noqa: S311 -- seeds of samplers
        build = load_factory(factory)
        assembly = build(self._config, on_progress=_logger.info, own_process=False)
        with contextlib.ExitStack() as undo:
            undo.callback(assembly.close)
            self._model = assembly.info
            self._tokenizer = Tokenizer.load(
                self._model.tokenizer_path,
                revision=self._config.revision,
                trust_remote_code=self._config.trust_remote_code,
            )
            self._driver = LocalDriver(assembly)
            self._close = undo.pop_all().close

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and everything else. Idempotent."""
        with self._lock:
            self._driver.close()
            self._close()

    # Facts.

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers."""
        return self._tokenizer.hf

    def get_model_info(self) -> ModelInfo:
        """Return what the engine is: name, device, limits."""
        return self._model

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what applies to requests without sampling parameters."""
        return default_sampling(self._model)

    def get_stats(self) -> EngineStats:
        """Return the engine's latest gauges and totals."""
        return self._driver.stats

    # Adapters.

    def add_lora(self, lora_request: LoRARequest, *, reload: bool = False) -> None:
        """Register an adapter; the same name with the same path is left alone unless ``reload``.

        Another path makes a new version. Raises ``AdapterError``.
        """
        with self._turn_of_this_thread():
            self._register(check_lora_request(lora_request), reload=reload)

    def remove_lora(self, lora_name: str) -> None:
        """Unregister an adapter. Raises ``UnknownModelError``."""
        with self._turn_of_this_thread():
            self._driver.directory.check_known(lora_name)
            self._driver.run_operation(RemoveAdapter(next(self._ids), lora_name))

    def list_loras(self) -> list[AdapterInfo]:
        """Return the registered adapters, by name."""
        return self._driver.directory.list()

    # Requests.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | str | Sequence[LoRARequest | str | None] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Return one finished output per prompt, in their order.

        A prompt is text or a list of token ids. ``sampling_params`` and ``lora_request`` are one
        for all or one per prompt; None means the model's own defaults and the base model. Prompts
        are checked before anything is computed. Raises ``RequestError`` or ``AdapterError``; if a
        request fails later, the others are aborted and its error is raised.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        items = read_batch(prompts, sampling_params, lora_request)
        with self._turn_of_this_thread():
            asked = [self._prepare(item, cache_salt) for item in items]
            for lora in dict.fromkeys(item.lora_request for item in items):
                self._register(lora, reload=False)
            return self._generate(asked)

    @contextlib.contextmanager
    def _turn_of_this_thread(self) -> Iterator[None]:
        with self._lock:
            if self._driver.is_closed:
                raise EngineDeadError("the engine is closed")
            yield

    def _prepare(self, item: BatchItem, cache_salt: str) -> Asked:
        if isinstance(item.prompt, str):
            text, tokens = item.prompt, self._tokenizer.encode(item.prompt)
        else:
            text, tokens = None, list(item.prompt)
        return Asked(
            request_id=f"request-{next(self._ids)}",
            prompt=text,
            prompt_token_ids=check_prompt(tokens, self._model),
            params=item.sampling_params,
            lora_request=item.lora_request,
            cache_salt=cache_salt,
        )

    def _register(self, lora: LoRARequest | str | None, *, reload: bool) -> None:
        """Raise unless requests can name ``lora``; registers what is new."""
        directory = self._driver.directory
        if isinstance(lora, str):
            directory.check_name(lora)
        elif lora is not None and (reload or not directory.has(lora)):
            path = os.path.abspath(lora.lora_path)
            self._driver.run_operation(AddAdapter(next(self._ids), lora.lora_name, path))

    def _generate(self, batch: Sequence[Asked]) -> list[RequestOutput]:
        generations: list[Generation] = []
        try:
            for asked in batch:
                requests = engine_requests(asked, self._ids, self._model, self._rng)
                # A batch may be longer than the engine's waiting queue.
                while not self._driver.has_room(len(requests), self._config.max_num_waiting):
                    self._driver.turn()
                ids = [request.request_id for request in requests]
                generations.append(Generation(asked, ids, self._tokenizer))
                self._driver.submit(generations[-1], requests)
            for generation in generations:
                while not generation.has_ended:
                    self._driver.turn()
                if generation.error is not None:
                    raise generation.error
            return [generation.output() for generation in generations]
        finally:
            self._driver.abort(generations)
