"""``POST /v1/completions``: text in, text out."""

import time

import msgspec

from ..frontend.outputs import CompletionOutput, RequestOutput
from ..frontend.tokenizer import check_token_ids
from .body import parse_body
from .chunks import ChunkEncoder, Envelope
from .completion_request import CompletionRequest
from .endpoint import Form, GenerationEndpoint
from .errors import HttpError
from .generation import Generation
from .logprobs import completion_logprobs, num_text_chars
from .responses import CompletionChoice
from .sampling_map import to_sampling_params

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_OBJECT = "text_completion"


class CompletionForm(Form):
    """One request for completions."""

    def __init__(
        self, body: CompletionRequest, generation: Generation, model: str, echoes: list[str]
    ) -> None:
        self.generation = generation
        self.envelope = Envelope(generation.request_id, _OBJECT, int(time.time()), model)
        self.stream = bool(body.stream)
        self.stream_usage = body.wants_stream_usage
        self.timing = bool(body.return_timing)
        self.with_logprobs = body.logprobs is not None
        self.echoes = echoes  # by prompt; empty = prompts are not shown

    def chunk_encoder(self) -> ChunkEncoder:
        """See ``Form``."""
        return _CompletionChunks(self)

    def choices(self, prompt_index: int, output: RequestOutput) -> list[msgspec.Struct]:
        """See ``Form``."""
        echo = self.echoes[prompt_index] if self.echoes else ""
        return [
            CompletionChoice(
                index=prompt_index * self.generation.sampling.n + choice.index,
                text=echo + choice.text,
                logprobs=completion_logprobs(choice.logprobs or (), text_offset=0)
                if self.with_logprobs
                else None,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in output.outputs
        ]


class _CompletionChunks(ChunkEncoder):
    """The events of one stream of completions."""

    __slots__ = ("_echoes", "_num_chars")

    def __init__(self, form: CompletionForm) -> None:
        super().__init__(
            form.envelope,
            num_choices=form.generation.sampling.n,
            with_logprobs=form.with_logprobs,
            with_usage=form.stream_usage,
        )
        self._echoes = form.echoes
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


class CompletionEndpoint(GenerationEndpoint):
    """Answers ``/v1/completions``."""

    id_prefix = "cmpl"
    prompt_field = "prompt"

    async def read_form(self, body: bytes, request_id: str) -> Form:
        """See ``GenerationEndpoint``."""
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
        sampling = to_sampling_params(
            request,
            self.state.engine.get_model_info().default_sampling,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=request.logprobs,
            logprobs_field="logprobs",
        )
        salt = request.cache_salt or ""
        generation = Generation(request_id, prompts, sampling, target.adapter_name, salt)
        echoes = [self._as_text(prompt) for prompt in prompts] if request.echo else []
        return CompletionForm(request, generation, target.shown_name, echoes)

    def _as_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        checked = check_token_ids(prompt, vocab_size=self.state.engine.get_model_info().vocab_size)
        return self.state.engine.tokenizer.decode(checked)
