"""``POST /v1/completions``: text in, text out."""

import time
from typing import Any

import msgspec

from ..frontend.outputs import CompletionOutput, RequestOutput
from ..frontend.tokenizer import check_token_ids
from .body import parse_body, wrong_type
from .endpoint import GenerationEndpoint
from .errors import HttpError
from .generation_request import GenerationFields, ParsedRequest, Prompt
from .responses import CompletionChoice, Envelope, completion_logprobs, num_text_chars
from .sse import ChunkEncoder

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_OBJECT = "text_completion"


class CompletionRequest(GenerationFields):
    """One or several prompts, as text or as token ids."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[Prompt]:
        """Return the prompts one by one. Raises ``HttpError`` for any other shape."""
        value = self.prompt
        if isinstance(value, str):
            return [_checked(value, "prompt")]
        if not isinstance(value, list):
            raise wrong_type("prompt", value, "a string, a list of strings or token ids")
        if not value:
            raise HttpError(400, "prompt is empty", code="empty_prompt", param="prompt")
        if isinstance(value[0], (str, list)):
            return [_checked(item, f"prompt[{i}]", like=value[0]) for i, item in enumerate(value)]
        return [_checked(value, "prompt")]


class CompletionEndpoint(GenerationEndpoint):
    """Answers ``/v1/completions``."""

    id_prefix = "cmpl"
    prompt_field = "prompt"

    async def parse(self, body: bytes, request_id: str) -> ParsedRequest:
        request = parse_body(CompletionRequest, body)
        request.check_stream_options()
        if request.echo and request.logprobs is not None:
            raise HttpError(
                400,
                "echo with logprobs is not served: there are no log-probabilities of the prompt",
                code="not_served",
                param="echo",
            )
        target = self.state.resolve(request.model)
        prompts = request.prompts()
        sampling = request.sampling_params(
            self.state.engine.get_model_info().default_sampling,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=request.logprobs,
            logprobs_field="logprobs",
        )
        return ParsedRequest(
            body=request,
            envelope=Envelope(request_id, _OBJECT, int(time.time()), target.shown_name),
            adapter_name=target.adapter_name,
            prompts=prompts,
            sampling=sampling,
            echoes=[self._as_text(prompt) for prompt in prompts] if request.echo else (),
        )

    def chunk_encoder(self, request: ParsedRequest) -> ChunkEncoder:
        return _CompletionChunks(request)

    def choices(
        self, request: ParsedRequest, prompt_index: int, output: RequestOutput
    ) -> list[msgspec.Struct]:
        sampling = request.sampling
        echo = request.echoes[prompt_index] if request.echoes else ""
        return [
            CompletionChoice(
                index=prompt_index * sampling.n + choice.index,
                text=echo + choice.text,
                logprobs=None
                if sampling.logprobs is None
                else completion_logprobs(choice.logprobs or (), text_offset=0),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in output.outputs
        ]

    def _as_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        checked = check_token_ids(prompt, vocab_size=self.state.engine.get_model_info().vocab_size)
        return self.state.engine.tokenizer.decode(checked)


class _CompletionChunks(ChunkEncoder):
    """The events of one stream of completions."""

    __slots__ = ("_echoes", "_num_chars")

    def __init__(self, request: ParsedRequest) -> None:
        super().__init__(request)
        self._echoes = request.echoes
        self._num_chars: dict[int, int] = {}  # by choice, for the offsets of log-probabilities

    def _first_event(self, prompt_index: int, index: int) -> bytes:
        if not self._echoes:
            return b""
        return self._event(CompletionChoice(index, self._echoes[prompt_index], None, None, None))

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
            index, choice.new_text, logprobs, choice.finish_reason, choice.stop_reason
        )


def _checked(value: object, path: str, *, like: object = None) -> Prompt:
    """Return ``value`` if it is text or token ids, and of the kind of ``like`` if given."""
    if like is not None and type(value) is not type(like):
        wanted = "a string" if isinstance(like, str) else "a list of token ids"
        raise wrong_type(path, value, f"{wanted} like the prompts before it")
    if not value:
        raise HttpError(400, f"{path} is empty", code="empty_prompt", param=path)
    if isinstance(value, str):
        return value
    assert isinstance(value, list)
    for index, item in enumerate(value):
        if type(item) is not int:
            raise wrong_type(f"{path}[{index}]", item, "a token id (an integer)")
    token_ids: list[int] = value
    return token_ids
