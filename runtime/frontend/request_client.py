"""Requests of ``AsyncEngine``: read, opened, and aborted where nobody waits for them any more.

Knows an engine only as its client; nothing of adapters or of the engine's start and end.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence

from ..engine.client import EngineClient
from ..engine.messages import AbortRequests, ModelInfo, RequestUpdate
from ..errors import EngineDeadError
from ..sampling import SamplingParams
from .generation import Generation
from .inputs import Asked, Prompt, check_prompt, check_room, default_sampling, engine_requests
from .outputs import LoRARequest
from .request_table import Notify, RequestTable
from .tokenizer import Tokenizer


class RequestClient:
    """Opens requests through an engine client and tells their owners what is new."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._rng = random.Random(client.config.seed)  # noqa: S311 -- seeds of samplers
        self._engine_ids = itertools.count(1)
        self._open = RequestTable()
        self._model: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._error: EngineDeadError | None = None

    def begin(self, model: ModelInfo, tokenizer: Tokenizer) -> None:
        """The engine is ready: requests may be read and opened from now on."""
        self._model, self._tokenizer = model, tokenizer

    async def read(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        lora_request: LoRARequest | str | None,
        cache_salt: str,
        add_special_tokens: bool,
    ) -> Asked:
        """Return what is asked, its prompt as tokens. Raises ``RequestError``."""
        model, tokenizer = self._ready()
        token_ids: Sequence[int] | str = prompt
        if isinstance(token_ids, str):
            token_ids = await tokenizer.encode_async(
                token_ids, add_special_tokens=add_special_tokens
            )
        return Asked(
            request_id=request_id or f"request-{next(self._engine_ids)}",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=check_prompt(token_ids, model),
            params=default_sampling(model) if sampling_params is None else sampling_params,
            lora_request=lora_request,
            cache_salt=cache_salt,
        )

    @contextlib.contextmanager
    def opened(self, asked: Asked, notify: Notify) -> Iterator[Generation]:
        """Send one engine request per choice; abort at the end what is still computed.

        Nothing is awaited on the way: all are open, or none. Raises ``RequestError``,
        ``OverloadedError``, ``EngineDeadError``.
        """
        generation = self._submit(asked, notify)
        try:
            yield generation
        finally:
            self._open.remove(generation)
            self._abort(generation)

    def abort(self, request_id: str) -> None:
        """See ``AsyncEngine.abort``."""
        generation = self._open.find(request_id)
        if generation is not None:
            self._client.send(AbortRequests(tuple(generation.open_engine_ids)))

    def take(self, updates: Sequence[RequestUpdate]) -> None:
        """Take what the engine says of requests."""
        unneeded = self._open.take(updates)
        if unneeded:
            self._client.send(AbortRequests(unneeded))

    def fail_all(self, error: EngineDeadError) -> None:
        """End every open request with ``error``; no other is opened."""
        self._error = error
        self._open.fail_all(error)

    def _ready(self) -> tuple[ModelInfo, Tokenizer]:
        assert self._model is not None and self._tokenizer is not None, "not begun"
        return self._model, self._tokenizer

    def _submit(self, asked: Asked, notify: Notify) -> Generation:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        self._open.check_new(asked.request_id)
        check_room(len(self._open), asked.params.n, self._client.config)
        model, tokenizer = self._ready()
        requests = engine_requests(asked, self._engine_ids, model, self._rng)
        ids = [request.request_id for request in requests]
        generation = Generation(asked, ids, tokenizer)
        for request in requests:
            self._client.send(request)
        self._open.add(generation, notify)
        return generation

    def _abort(self, generation: Generation) -> None:
        open_ids = generation.open_engine_ids
        if open_ids and self._error is None:
            with contextlib.suppress(EngineDeadError):
                self._client.send(AbortRequests(tuple(open_ids)))
