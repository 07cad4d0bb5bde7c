"""``Engine``: the synchronous front end, with the model in this process.

It computes in a thread of its own and changes nothing that other threads share: no signal
handler, no logging, no torch settings. It works in a notebook, under a running event loop, and
for several threads at once, whose requests share the batches.
"""

import itertools
import logging
import random
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ..adapters.registry import AdapterInfo
from ..config.engine import EngineConfig
from ..engine.messages import AddAdapter, EngineStats, ModelInfo, RemoveAdapter
from ..engine.process import load_factory
from ..engine.spawn import DEFAULT_FACTORY
from ..engine.tokenizer import load_tokenizer
from ..sampling import SamplingParams
from .batch import BatchItem, read_batch
from .codec import codec_of
from .engine_thread import EngineThread
from .generation import Generation
from .inputs import Asked, Prompt, check_prompt, default_sampling, engine_requests, make_config
from .jobs import AdapterJob, GenerateJob, Submission
from .lora_directory import adapter_path, check_lora_request
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
        self._ids = itertools.count(1)
        self._rng = random.Random(self._config.seed)  # noqa: S311 -- seeds of samplers
        self._encode_lock = threading.Lock()  # tokenizers in Python need not be safe for threads
        build = load_factory(factory)
        built_from = self._config
        self._thread = EngineThread(
            lambda on_progress: build(built_from, on_progress=on_progress, own_process=False)
        )
        # Also at interpreter exit, and for an engine that nobody closed.
        self._finalizer = weakref.finalize(self, self._thread.close)
        self._model = self._thread.info
        try:
            self._hf = load_tokenizer(
                self._model.model_path,
                revision=self._config.revision,
                trust_remote_code=self._config.trust_remote_code,
            )
            self._tokenizer = Tokenizer(codec_of(self._hf))
        except BaseException:
            self.close()
            raise

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
        """Free the model and everything else; what runs fails. Idempotent."""
        self._finalizer()

    # Facts.

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers."""
        return self._hf

    def get_model_info(self) -> ModelInfo:
        """Return what the engine is: name, device, limits."""
        return self._model

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what applies to requests without sampling parameters."""
        return default_sampling(self._model)

    def get_stats(self) -> EngineStats:
        """Return the engine's latest gauges and totals."""
        return self._thread.driver.stats

    # Adapters.

    def add_lora(self, lora_request: LoRARequest, *, reload: bool = False) -> None:
        """Register an adapter; the same name with the same path is left alone unless ``reload``.

        Another path makes a new version. Raises ``AdapterError``.
        """
        self._register(check_lora_request(lora_request), reload=reload)

    def remove_lora(self, lora_name: str) -> None:
        """Unregister an adapter. Raises ``UnknownModelError``."""
        self._thread.driver.directory.check_known(lora_name)
        self._thread.run(AdapterJob(RemoveAdapter(next(self._ids), lora_name)))

    def list_loras(self) -> list[AdapterInfo]:
        """Return the registered adapters, by name."""
        return self._thread.driver.directory.list()

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
        with self._encode_lock:
            batch = [self._prepare(item, cache_salt) for item in items]
        for lora in dict.fromkeys(item.lora_request for item in items):
            self._register(lora, reload=False)
        return self._thread.run(GenerateJob(batch, self._config.max_num_waiting))

    def _prepare(self, item: BatchItem, cache_salt: str) -> Submission:
        if isinstance(item.prompt, str):
            text, tokens = item.prompt, self._tokenizer.encode(item.prompt)
        else:
            text, tokens = None, list(item.prompt)
        asked = Asked(
            request_id=f"request-{next(self._ids)}",
            prompt=text,
            prompt_token_ids=check_prompt(tokens, self._model),
            params=item.sampling_params,
            lora_request=item.lora_request,
            cache_salt=cache_salt,
        )
        requests = engine_requests(asked, self._ids, self._model, self._rng)
        ids = [request.request_id for request in requests]
        return Submission(Generation(asked, ids, self._tokenizer), requests)

    def _register(self, lora: LoRARequest | str | None, *, reload: bool) -> None:
        """Raise unless requests can name ``lora``; registers what is new."""
        directory = self._thread.driver.directory
        if isinstance(lora, str):
            directory.check_name(lora)
        elif lora is not None and (reload or not directory.has(lora)):
            path = adapter_path(lora)
            self._thread.run(AdapterJob(AddAdapter(next(self._ids), lora.lora_name, path)))
