"""``POST /v1/completions``: text in, text out."""

import time
from collections.abc import Callable

import msgspec

from ..frontend.outputs import CompletionOutput, RequestOutput
from ..sampling import SamplingParams
from .body import given, parse_body
from .endpoint import GenerationEndpoint, OpenRecord
from .errors import HttpError
from .generation_request import GenerationFields, ParsedRequest, Prompt
from .json_values import wrong_type
from .message_schema import PromptField
from .responses import (
    CompletionChoice,
    CompletionLogprobs,
    Envelope,
    completion_logprobs,
    num_text_chars,
    prompt_logprobs,
)
from .sse import ChunkEncoder

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_OBJECT = "text_completion"


class CompletionRequest(GenerationFields):
    """One or several prompts, as text or as token ids."""

    prompt: PromptField
    logprobs: int | None = given("Return the log-probability of each token and of this many alternatives.")
    echo: bool | None = given("Begin each text with the prompt.")

    @property
    def num_prompts(self) -> int:
        """Number of prompts, if the field holds prompts."""
        value = self.prompt
        return len(value) if value and isinstance(value, list) and _is_prompt(value[0]) else 1

    @property
    def generates_nothing(self) -> bool:
        """Whether the request wants only the prompt: then each choice is one event of a stream."""
        return 0 in (self.max_tokens, self.max_completion_tokens)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As the request says, or as the log-probabilities of an echoed prompt need."""
        asked = self.prompt_logprobs
        if not self.echo:
            return asked
        if self.logprobs is not None:
            return max(self.logprobs, asked or 0)
        return asked or 0 if self.generates_nothing else asked

    def prompts(self) -> list[Prompt]:
        """Return the prompts one by one. Raises ``HttpError`` for any other shape."""
        value = self.prompt
        if isinstance(value, str):
            return [_checked(value, "prompt")]
        if not isinstance(value, list):
            raise wrong_type("prompt", value, "a string, a list of strings or token ids")
        if not value:
            raise HttpError(400, "prompt is empty", code="empty_prompt", param="prompt")
        if _is_prompt(value[0]):
            return [_checked(item, f"prompt[{i}]", like=value[0]) for i, item in enumerate(value)]
        return [_checked(value, "prompt")]


class CompletionEndpoint(GenerationEndpoint):
    """Answers ``/v1/completions``."""

    id_prefix = "cmpl"
    prompt_field = "prompt"

    async def parse(self, body: bytes, record: OpenRecord) -> ParsedRequest:
        request = await parse_body(CompletionRequest, body, self.state.unknown_fields)
        record.read(request.model, stream=bool(request.stream))
        request.check_stream_options()
        if not request.generates_nothing:
            request.check_scores(has_echo=bool(request.echo) and request.logprobs is not None)
        target = await self.state.resolve(request.model, request.mix)
        sampling = request.sampling_params(
            self.state.engine.get_model_info().default_sampling,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=request.logprobs,
            logprobs_field="logprobs",
        )
        self.check_num_sequences(request.num_prompts, sampling.n)
        return ParsedRequest(
            body=request,
            envelope=Envelope(record.request_id, _OBJECT, int(time.time()), target.shown_name),
            adapter=target.adapter,
            prompts=request.prompts(),
            sampling=sampling,
            echo=bool(request.echo),
        )

    def stream_encoder(self, request: ParsedRequest) -> ChunkEncoder:
        if request.sampling.max_tokens == 0:
            return _WholeChoices(request, self._echo_of, self.choices)
        return _CompletionChunks(request, self._echo_of)

    def choices(
        self, request: ParsedRequest, prompt_index: int, output: RequestOutput
    ) -> list[msgspec.Struct]:
        sampling = request.sampling
        echo = self._echo_of(output, sampling) if request.echo else ""
        shows_tokens = bool(request.body.return_token_ids)
        shows_scores = request.body.prompt_logprobs is not None
        return [
            CompletionChoice(
                index=prompt_index * sampling.n + choice.index,
                text=echo + choice.text,
                logprobs=None
                if sampling.logprobs is None
                else self._logprobs(output, choice, with_prompt=bool(request.echo)),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if shows_tokens else msgspec.UNSET,
                prompt_token_ids=output.prompt_token_ids if shows_tokens else msgspec.UNSET,
                prompt_logprobs=prompt_logprobs(output) if shows_scores else msgspec.UNSET,
            )
            for choice in output.outputs
        ]

    def _logprobs(
        self, output: RequestOutput, choice: CompletionOutput, *, with_prompt: bool
    ) -> CompletionLogprobs:
        """Of a choice's tokens, after those of an echoed prompt (none for its first token)."""
        tokens = choice.logprobs or []
        if not with_prompt:
            return completion_logprobs(tokens, text_offset=0)
        scores = [one for one in output.prompt_logprobs or () if one is not None]
        first = self.state.engine.tokenizer.token_text(output.prompt_token_ids[0])
        rest = completion_logprobs([*scores, *tokens], text_offset=len(first))
        return CompletionLogprobs(
            [first, *rest.tokens],
            [None, *rest.token_logprobs],
            [None, *rest.top_logprobs],
            [0, *rest.text_offset],
        )

    def _echo_of(self, output: RequestOutput, sampling: SamplingParams) -> str:
        """Return the text of the prompt: as given, or decoded if it was truncated or is tokens."""
        if output.prompt is not None and sampling.truncate_prompt_tokens is None:
            return output.prompt
        return self.state.engine.tokenizer.decode(output.prompt_token_ids)


class _CompletionChunks(ChunkEncoder):
    __slots__ = ("_echo_of", "_num_chars", "_request")

    def __init__(
        self, request: ParsedRequest, echo_of: Callable[[RequestOutput, SamplingParams], str]
    ) -> None:
        super().__init__(request)
        self._request = request
        self._echo_of = echo_of
        self._num_chars: dict[int, int] = {}  # by choice, for the offsets of log-probabilities

    def _first_event(self, index: int, output: RequestOutput) -> bytes:
        if not (self._request.echo or self._with_token_ids):
            return b""
        echo = self._echo_of(output, self._request.sampling) if self._request.echo else ""
        first = CompletionChoice(index, echo, None, None, None)
        if self._with_token_ids:
            first = msgspec.structs.replace(first, token_ids=(), prompt_token_ids=output.prompt_token_ids)
        return self._event(first)

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        before = b'{"index":%d,"text":' % index
        return before, b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def _part(self, index: int, choice: CompletionOutput) -> msgspec.Struct:
        logprobs = None
        if self._with_logprobs:
            new = choice.new_logprobs or ()
            offset = self._num_chars.get(index, 0)
            logprobs = completion_logprobs(new, text_offset=offset)
            self._num_chars[index] = offset + num_text_chars(new)
        return CompletionChoice(
            index=index,
            text=choice.new_text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.new_token_ids if self._with_token_ids else msgspec.UNSET,
        )


class _WholeChoices(_CompletionChunks):
    """The events of a stream of choices without tokens: one event for each, at its end."""

    __slots__ = ("_choices",)

    def __init__(
        self,
        request: ParsedRequest,
        echo_of: Callable[[RequestOutput, SamplingParams], str],
        choices: Callable[[ParsedRequest, int, RequestOutput], list[msgspec.Struct]],
    ) -> None:
        super().__init__(request, echo_of)
        self._choices = choices

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        if not output.finished:
            return b""
        self._count(prompt_index, output)
        choices = self._choices(self._request, prompt_index, output)
        return b"".join(self._event(choice) for choice in choices)


def _is_prompt(value: object) -> bool:
    """Whether ``value`` is a whole prompt, not a single token."""
    return isinstance(value, str | list)


def _checked(value: object, path: str, *, like: object = None) -> Prompt:
    """Return ``value`` if it is text or token ids, and of the same kind as ``like``, if given."""
    if like is not None and type(value) is not type(like):
        wanted = "a string" if isinstance(like, str) else "a list of token ids"
        raise wrong_type(path, value, f"{wanted} like the prompts before it")
    if not value:
        raise HttpError(400, f"{path} is empty", code="empty_prompt", param=path)
    if isinstance(value, str):
        return value
    assert isinstance(value, list)
    if set(map(type, value)) != {int}:  # rare
        index = next(at for at, item in enumerate(value) if type(item) is not int)
        raise wrong_type(f"{path}[{index}]", value[index], "a token id (an integer)")
    token_ids: list[int] = value
    return token_ids
