"""One caller's request while it runs: its choices, their text, and the new part of its output.

Turns engine updates into ``RequestOutput``; knows nothing of how updates arrive or of their
readers. Updates between two reads are merged.
"""

from collections.abc import Callable, Sequence

from ..errors import CorunError, StepFailedError, rebuild_error
from ..plan import TokenLogprobs
from ..sampling import SamplingParams
from ..scheduler.events import AdapterStart, RequestUpdate
from ..timing import EngineTiming
from .detokenizer import Detokenizer, StoppingDetokenizer
from .inputs import PreparedRequest
from .outputs import ChoiceHistory, CompletionOutput, Logprob, RequestOutput, RequestWatch, TokenCandidates
from .special_stops import SpecialStoppingDetokenizer
from .tokenizer import Tokenizer


class Choice:
    """One choice. In the engine it is one request."""

    __slots__ = (
        "_adapter_start",
        "_cumulative_logprob",
        "_detokenizer",
        "_history",
        "_index",
        "_num_cached_tokens",
        "_num_pieces_returned",
        "_num_tokens_returned",
        "_params",
        "_prompt_token_ids",
        "_stop_reason",
        "_timing",
        "_tokenizer",
        "error",
        "finish_reason",
        "prompt_logprobs",
    )

    def __init__(
        self, index: int, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = _detokenizer(tokenizer, prompt, params)
        self._params = params
        self._prompt_token_ids = prompt
        self.prompt_logprobs: list[TokenCandidates | None] | None = None
        wants_logprobs = params.logprobs is not None
        self._history = ChoiceHistory(logprobs=[] if wants_logprobs else None)
        self._cumulative_logprob = 0.0
        self._num_pieces_returned = 0
        self._num_tokens_returned = 0
        self._stop_reason: str | int | None = None
        self._num_cached_tokens = 0
        self._adapter_start: AdapterStart | None = None
        self._timing: EngineTiming | None = None
        self.finish_reason: str | None = None
        self.error: CorunError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no more output follows."""
        return self.finish_reason is not None

    def update(self, update: RequestUpdate) -> bool:
        """Apply an update to an open choice; return whether the engine can stop it."""
        self.record_details(update)
        if self._params.max_tokens == 0:
            update = _without_tokens(update)
        history, detokenizer = self._history, self._detokenizer
        num_shown = len(update.token_ids)
        if update.stop_token_id is not None and self._hides_stop(update):
            num_shown -= 1
        for position, token_id in enumerate(update.token_ids):
            if update.logprobs is not None:
                self._add_logprobs(token_id, update.logprobs[position])
            history.token_ids.append(token_id)
            is_hidden = position == num_shown
            text = detokenizer.hide(token_id) if is_hidden else detokenizer.push(token_id)
            if text:
                history.pieces.append(text)
            if detokenizer.stop is not None:
                self._stop_reason = detokenizer.stop
                self.finish_reason = "stop"
                return update.finish_reason is None
        if update.finish_reason is not None:
            self._end(update)
        return False

    def complete(self, update: RequestUpdate) -> None:
        """Apply the engine's final update to a choice that has ended or was closed."""
        self.finish_reason = self.finish_reason or "abort"
        self._count_preemptions(update)

    def output(self) -> CompletionOutput:
        """Return the whole output, and what is new since the last call."""
        output = self._output(self._num_tokens_returned, self._num_pieces_returned)
        self._num_tokens_returned, self._num_pieces_returned = output.num_tokens, output.num_pieces
        return output

    def last_output(self) -> CompletionOutput:
        """Return the whole output, with nothing new."""
        return self._output(len(self._history.token_ids), len(self._history.pieces))

    def _output(self, first_token: int, first_piece: int) -> CompletionOutput:
        history = self._history
        logprobs = history.logprobs
        return CompletionOutput(
            index=self._index,
            new_text="".join(history.pieces[first_piece:]),
            new_token_ids=history.token_ids[first_token:],
            new_logprobs=None if logprobs is None else logprobs[first_token:],
            cumulative_logprob=None if logprobs is None else self._cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            history=history,
            num_pieces=len(history.pieces),
            num_tokens=len(history.token_ids),
            num_cached_tokens=self._num_cached_tokens,
            adapter_start=self._adapter_start,
            timing=self._timing,
        )

    def fail(self, error: CorunError) -> None:
        self.error = error
        self.finish_reason = "error"

    def record_details(self, update: RequestUpdate) -> None:
        """Store what arrives with the first token. For a closed choice nothing else is stored."""
        if update.prompt_logprobs is not None:
            scored = zip(self._prompt_token_ids[1:], update.prompt_logprobs, strict=True)
            scores = [_candidates(token_id, one, self._tokenizer) for token_id, one in scored]
            self.prompt_logprobs = [None, *scores]
        if update.num_cached_tokens:
            self._num_cached_tokens = update.num_cached_tokens
        if update.timing is not None:
            self._timing = EngineTiming(
                update.timing.parts,
                update.timing.num_predicted_output_tokens,
                update.num_host_cached_tokens,
                adapter_version=update.timing.adapter_version,
            )
        if update.cold_start is not None:
            self._adapter_start = update.cold_start

    def _count_preemptions(self, update: RequestUpdate) -> None:
        if self._timing is not None:
            self._timing.num_preemptions = update.num_preemptions
            self._timing.num_squashes = update.num_squashes

    def _end(self, update: RequestUpdate) -> None:
        self._count_preemptions(update)
        if update.finish_reason == "error":
            message = update.error or "the engine gave no reason"
            error = rebuild_error(update.error_kind, message, default=StepFailedError)
            error.timing = self._timing
            self.fail(error)
            return
        held = self._detokenizer.finish()
        if held:
            self._history.pieces.append(held)
        self.finish_reason = str(update.finish_reason)
        if update.stop_token_id in self._params.stop_token_ids:
            self._stop_reason = update.stop_token_id

    def _hides_stop(self, update: RequestUpdate) -> bool:
        """Whether the last token ended the choice and its text must not be shown."""
        is_last = update.token_ids[-1:] == (update.stop_token_id,)
        return is_last and not self._params.include_stop_str_in_output

    def _add_logprobs(self, token_id: int, logprobs: TokenLogprobs) -> None:
        assert self._history.logprobs is not None
        self._cumulative_logprob += logprobs.logprob
        self._history.logprobs.append(_candidates(token_id, logprobs, self._tokenizer))


def _detokenizer(tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> Detokenizer:
    """Return a choice's detokenizer, which also finds its stop strings."""
    stream = tokenizer.stream(prompt, skip_special_tokens=params.skip_special_tokens)
    if not params.stop:
        return stream
    spellings = tokenizer.special_tokens.spellings(params.stop)
    if spellings:
        return SpecialStoppingDetokenizer(stream, tokenizer.special_tokens, params, spellings)
    return StoppingDetokenizer(
        stream,
        stops=params.stop,
        include_stop_in_text=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )


def _without_tokens(update: RequestUpdate) -> RequestUpdate:
    """Return the update without tokens: the engine samples one even for max_tokens 0."""
    reason = "length" if update.finish_reason == "stop" else update.finish_reason
    return update._replace(token_ids=(), logprobs=None, finish_reason=reason, stop_token_id=None)


def _candidates(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> TokenCandidates:
    text = tokenizer.token_text
    candidates: TokenCandidates = {token_id: Logprob(logprobs.logprob, logprobs.rank, text(token_id))}
    pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    for rank, (top_id, logprob) in enumerate(pairs, start=1):
        candidates.setdefault(top_id, Logprob(logprob, rank, text(top_id)))
    return candidates


class Generation:
    """One caller's request with its choices; ``engine_ids``: their ids in the engine, in order."""

    __slots__ = (
        "_num_computing",
        "_num_open",
        "_prepared",
        "_watch",
        "choices",
        "engine_ids",
        "error",
        "notify",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        engine_ids: Sequence[int],
        notify: "Notify",
        watch: "RequestWatch | None" = None,
    ) -> None:
        """``notify`` is called at new output and at failure; it must not raise."""
        self._watch = watch
        self._prepared = prepared
        self.engine_ids = engine_ids
        self.choices = [
            Choice(index, prepared.tokenizer, prepared.prompt_token_ids, prepared.params)
            for index in range(len(engine_ids))
        ]
        self.notify = notify
        self._num_open = len(self.choices)
        self._num_computing = len(self.choices)  # without a final update of the engine
        self.error: CorunError | None = None  # the reason, if the request failed

    @property
    def request_id(self) -> str:
        return self._prepared.request_id

    @property
    def open_engine_ids(self) -> list[int]:
        """Engine requests that still compute."""
        pairs = zip(self.engine_ids, self.choices, strict=True)
        return [engine_id for engine_id, choice in pairs if not choice.has_ended]

    @property
    def has_ended(self) -> bool:
        """Whether all choices have ended, or one has failed."""
        return self._num_open == 0 or self.error is not None

    def fail(self, error: CorunError) -> None:
        for choice in self.choices:
            if not choice.has_ended:
                choice.fail(error)
                self.count_end(choice)

    def count_end(self, choice: Choice) -> None:
        self._num_open -= 1
        if self.error is None:
            self.error = choice.error

    def complete(self, choice: Choice, update: RequestUpdate) -> None:
        """Apply the engine's final update to a choice; after the last one, notify the watch."""
        choice.complete(update)
        self._num_computing -= 1
        if self._num_computing == 0:
            self._notify_end()

    def lose(self) -> None:
        """End without final updates: the engine sends nothing any more."""
        if self._num_computing:
            self._num_computing = 0
            for choice in self.choices:
                choice.finish_reason = choice.finish_reason or "abort"
            self._notify_end()

    def _notify_end(self) -> None:
        if self._watch is not None:
            outputs = [choice.last_output() for choice in self.choices]
            self._watch.ended(self._output(outputs, finished=True))

    def output(self) -> RequestOutput:
        """Return the state of all choices, with what is new since the last call."""
        outputs = [choice.output() for choice in self.choices]
        return self._output(outputs, finished=self.has_ended)

    def _output(self, outputs: list[CompletionOutput], *, finished: bool) -> RequestOutput:
        prepared = self._prepared
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            lora_request=prepared.lora_request,
            prompt_logprobs=self.choices[0].prompt_logprobs,
        )


Notify = Callable[[Generation], None]
