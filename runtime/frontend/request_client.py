"""Requests of a front end: prepares, opens, updates and aborts them.

An open request is one ``Generation``; each update of the engine is matched to it here.
Knows an engine only as its client, and nothing of adapters or of the engine's start and end.
"""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

from ..engine.client import EngineClient
from ..engine.messages import AbortRequests, AddRequest, AddRequests, ModelInfo, StepOutputs
from ..errors import EngineDeadError, RequestError
from ..grammar.messages import GrammarTokens
from ..grammar.tags import with_trigger_ids
from ..grammar.trial import GrammarTrials
from ..limits import check_bad_words, check_num_open, check_num_sequences, check_predicted_output, check_stops
from ..sampling import SamplingParams
from ..scheduler.events import RequestUpdate
from .adapter_conventions import Conventions, MakePrompt
from .engine_watch import Waker
from .generation import Choice, Generation, Notify
from .inputs import (
    Lora,
    PreparedRequest,
    Prompt,
    bad_words_ids,
    check_prompt,
    check_token_rules,
    default_sampling,
    engine_sampling,
    text_limit,
    truncate_prompt,
)
from .outputs import RequestOutput, RequestWatch
from .tokenizer import Tokenizer


class RequestClient:
    """Opens requests through an engine client and notifies their owners of output."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._config = client.config
        self._rng = random.Random(client.config.seed)  # noqa: S311 -- seeds of samplers
        self._engine_ids = itertools.count(1)
        self._by_id: dict[str, Generation] = {}
        # Engine requests that still compute, with their generation and choice.
        self._by_engine_id: dict[int, tuple[Generation, Choice]] = {}
        # The same for requests that were closed before their final update.
        self._closed: dict[int, tuple[Generation, Choice]] = {}
        self.num_sent = 0  # engine requests so far; the engine receives them in this order
        self._num_taken = 0  # of these, received by the engine
        self._num_waiting = 0  # of these, at the engine's last message
        self._on_turn: set[Callable[[], None]] = set()  # called after each message of the engine
        self._model: ModelInfo | None = None
        self._trials: GrammarTrials | None = None
        self._error: EngineDeadError | None = None

    def begin(self, model: ModelInfo, tokenizer: Tokenizer) -> None:
        """The engine is ready: requests can be prepared and opened."""
        self._model = model
        self._trials = GrammarTrials(
            lambda: GrammarTokens(model.vocab_size, dict(tokenizer.codec.added_tokens()))
        )

    async def end(self) -> None:
        """End the process that tries grammars. Idempotent."""
        if self._trials is not None:
            await self._trials.close()

    async def prepare(
        self,
        prompt: Prompt | MakePrompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        lora_request: Lora,
        conventions: Conventions,
        add_special_tokens: bool = True,
        cache_salt: str = "",
        predicted_output_tokens: int | None = None,
    ) -> PreparedRequest:
        """Check a request, and turn its prompt into tokens. Raises ``RequestError``.

        ``conventions``: the adapter's, which make the tokens.
        """
        model, tokenizer = self._ready(), conventions.tokenizer
        check_predicted_output(predicted_output_tokens)
        params = default_sampling(model) if sampling_params is None else sampling_params
        vocab_size = conventions.vocab_size or model.vocab_size
        self._check_sizes(params, vocab_size)
        token_ids: Sequence[int]
        if isinstance(prompt, str):
            token_ids = await tokenizer.encode_async(
                prompt, add_special_tokens=add_special_tokens, limit=text_limit(params, model.max_model_len)
            )
        elif callable(prompt):
            made = await prompt(conventions)
            token_ids, params = made.token_ids, made.params
        else:
            token_ids = prompt
        if params.structured_output is not None:
            assert self._trials is not None, "not begun"
            structured = with_trigger_ids(params.structured_output, tokenizer.codec.added_tokens)
            await self._trials.check(structured)
            params = dataclasses.replace(params, structured_output=structured)
        if params.bad_words:
            ids = (*params.bad_words_ids, *await bad_words_ids(params.bad_words, tokenizer))
            params = dataclasses.replace(params, bad_words_ids=ids)
        kept = truncate_prompt(token_ids, params, model.max_model_len)
        checked = check_prompt(kept, model.max_model_len, vocab_size)
        return PreparedRequest(
            request_id=request_id or f"request-{next(self._engine_ids)}",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=checked,
            params=params,
            samplings=engine_sampling(
                params, num_prompt_tokens=len(checked), max_model_len=model.max_model_len, rng=self._rng
            ),
            lora_request=lora_request,
            tokenizer=tokenizer,
            conventions=None if lora_request is None else conventions.digest,
            waited_s=conventions.waited_s,
            cache_salt=cache_salt,
            predicted_output_tokens=predicted_output_tokens,
        )

    def open(
        self, prepared: PreparedRequest, notify: Notify, watch: RequestWatch | None = None
    ) -> Generation:
        """Send one engine request per choice. The caller must ``close`` the result in any case.

        All choices are opened, or none. Raises ``RequestError``, ``OverloadedError``,
        ``EngineDeadError``.
        """
        generation, requests = self._enter(prepared, notify, watch)
        if watch is not None:
            watch.opened()
        self._client.send(AddRequests(requests))
        return generation

    def _enter(
        self, prepared: PreparedRequest, notify: Notify, watch: RequestWatch | None = None
    ) -> tuple[Generation, tuple[AddRequest, ...]]:
        """Open a request here, and return the messages to send for it at once."""
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        if prepared.request_id in self._by_id:
            raise RequestError(
                f"a request with id {prepared.request_id!r} is already open", param="request_id"
            )
        self._check_room(prepared.params.n)
        requests = prepared.engine_requests(self._engine_ids)
        ids = [request.request_id for request in requests]
        generation = Generation(prepared, ids, notify, watch)
        self.num_sent += len(requests)
        self._by_id[generation.request_id] = generation
        for engine_id, choice in zip(ids, generation.choices, strict=True):
            self._by_engine_id[engine_id] = generation, choice
        return generation, tuple(requests)

    def close(self, generation: Generation) -> None:
        """Remove a request, and abort its choices that still compute."""
        self._by_id.pop(generation.request_id, None)
        for engine_id in generation.engine_ids:
            entry = self._by_engine_id.pop(engine_id, None)
            if entry is not None and self._error is None:
                self._closed[engine_id] = entry
        open_ids = generation.open_engine_ids
        if open_ids and self._error is None:
            with contextlib.suppress(EngineDeadError):
                self._client.send(AbortRequests(tuple(open_ids)))

    async def complete(self, batch: Sequence[PreparedRequest]) -> list[RequestOutput]:
        """Return the last outputs of a batch, which may be longer than the waiting queue.

        The first request that fails ends the batch with its error.
        """
        waker = Waker()
        ended: list[Generation] = []
        generations: list[Generation] = []
        open_ones: set[Generation] = set()

        def record_end(generation: Generation) -> None:
            if generation.has_ended:
                ended.append(generation)
                waker.set()

        try:
            while open_ones or len(generations) < len(batch):
                together: list[AddRequest] = []
                while len(generations) < len(batch):
                    prepared = batch[len(generations)]
                    if not self._can_wait(prepared.params.n):
                        self._on_turn.add(waker.set)
                        break
                    generation, requests = self._enter(prepared, record_end)
                    generations.append(generation)
                    open_ones.add(generation)
                    together += requests
                else:
                    self._on_turn.discard(waker.set)
                if together:  # the same batch makes the same steps, at any speed of sending
                    self._client.send(AddRequests(tuple(together)))
                await waker
                while ended:
                    generation = ended.pop()
                    if generation.error is not None:
                        raise generation.error
                    self.close(generation)
                    open_ones.discard(generation)
        finally:
            self._on_turn.discard(waker.set)
            for generation in open_ones:
                self.close(generation)
        return [generation.output() for generation in generations]

    def abort(self, request_id: str) -> None:
        """End a request; its owner gets the output so far."""
        generation = self._by_id.get(request_id)
        if generation is not None:
            self._client.send(AbortRequests(tuple(generation.open_engine_ids)))

    def apply(self, message: StepOutputs) -> None:
        """Apply the engine's updates of requests.

        A request is notified once for any number of choices with updates.
        """
        self._num_taken, self._num_waiting = message.num_requests, message.load.num_waiting
        unneeded: list[int] = []
        touched: dict[Generation, None] = {}  # in order
        for update in message.updates:
            engine_id = update.request_id
            entry = self._by_engine_id.get(engine_id)
            if entry is None:
                self._apply_to_closed(update)
                continue
            generation, choice = entry
            if choice.finish_reason is None:  # else a stop string has ended it
                if choice.update(update):
                    unneeded.append(engine_id)
                if choice.finish_reason is not None:
                    generation.count_end(choice)
                touched[generation] = None
            if update.finish_reason is not None:
                del self._by_engine_id[engine_id]
                generation.complete(choice, update)
        for generation in touched:
            generation.notify(generation)
        for notify in tuple(self._on_turn):
            notify()
        if unneeded:
            self._client.send(AbortRequests(tuple(unneeded)))

    def _apply_to_closed(self, update: RequestUpdate) -> None:
        """Apply an update to a request that was closed while it computed."""
        entry = self._closed.get(update.request_id)
        if entry is None:  # it was ended without a final update
            return
        generation, choice = entry
        choice.record_details(update)
        if update.finish_reason is not None:
            del self._closed[update.request_id]
            generation.complete(choice, update)

    def fail_all(self, error: EngineDeadError) -> None:
        """End every open request with ``error``; no more can be opened."""
        self._error = error
        for generation in tuple(self._by_id.values()):
            generation.fail(EngineDeadError(str(error)))  # each is raised in its own task
            generation.notify(generation)
            generation.lose()
        for generation, _ in self._closed.values():
            generation.lose()
        self._closed.clear()
        for notify in tuple(self._on_turn):
            notify()

    def _check_sizes(self, params: SamplingParams, vocab_size: int) -> None:
        """Raise ``RequestError`` for what is too long to be looked at."""
        config = self._config
        check_stops(
            params.stop, max_stop_strings=config.max_stop_strings, max_stop_bytes=config.max_stop_bytes
        )
        check_bad_words(params.bad_words, max_bad_words_bytes=config.max_bad_words_bytes)
        check_token_rules(params, vocab_size, config.max_logit_bias)

    def _ready(self) -> ModelInfo:
        assert self._model is not None, "not begun"
        return self._model

    def _check_room(self, num_new: int) -> None:
        """Raise for requests that cannot even wait, before they are sent."""
        limits = {"max_num_seqs": self._config.max_num_seqs, "max_num_waiting": self._config.max_num_waiting}
        check_num_sequences(1, num_new, **limits)
        check_num_open(len(self._by_engine_id), num_new, **limits)

    def _can_wait(self, num_new: int) -> bool:
        """Whether the engine's queue has room for ``num_new`` more; true if nothing is open."""
        num_open = len(self._by_engine_id)
        if num_open == 0 or self._error is not None:
            return True
        num_waiting = self._num_waiting + self.num_sent - self._num_taken
        max_waiting = self._config.max_num_waiting
        return (
            num_waiting + num_new <= max_waiting
            and num_open + num_new <= self._config.max_num_seqs + max_waiting
        )
