"""``POST /v1/chat/completions``: a conversation in, the next message out."""

import time

import msgspec

from ..errors import NotServedError
from ..frontend.outputs import CompletionOutput, RequestOutput, TokenCandidates
from .body import parse_body
from .chat_request import ChatRequest, template_messages
from .chunks import ChunkEncoder, Envelope
from .endpoint import Form, GenerationEndpoint
from .generation import Generation
from .logprobs import chat_logprobs
from .responses import ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage
from .sampling_map import to_sampling_params

_OBJECT = "chat.completion"
_CHUNK_OBJECT = "chat.completion.chunk"

# Arguments of the renderer itself; a request may only set the template's own variables.
_RESERVED_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class ChatForm(Form):
    """One request for a chat completion."""

    def __init__(self, body: ChatRequest, generation: Generation, model: str) -> None:
        self.generation = generation
        self.stream = bool(body.stream)
        self.stream_usage = body.wants_stream_usage
        self.timing = bool(body.return_timing)
        object_name = _CHUNK_OBJECT if self.stream else _OBJECT
        self.envelope = Envelope(generation.request_id, object_name, int(time.time()), model)

    def chunk_encoder(self) -> ChunkEncoder:
        """See ``Form``."""
        return _ChatChunks(self)

    def logprobs(self, tokens: "list[TokenCandidates] | None") -> ChatLogprobs | None:
        """Return ``tokens`` in the form of this endpoint, if log-probabilities are asked for."""
        num_top = self.generation.sampling.logprobs
        return None if num_top is None else chat_logprobs(tokens or (), num_top=num_top)

    def choices(self, prompt_index: int, output: RequestOutput) -> list[msgspec.Struct]:
        """See ``Form``."""
        return [
            ChatChoice(
                index=choice.index,
                message=ChatMessage(choice.text),
                logprobs=self.logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in output.outputs
        ]


class _ChatChunks(ChunkEncoder):
    """The events of one chat stream."""

    __slots__ = ("_form",)

    def __init__(self, form: ChatForm) -> None:
        sampling = form.generation.sampling
        super().__init__(
            form.envelope,
            num_choices=sampling.n,
            with_logprobs=sampling.logprobs is not None,
            with_usage=form.stream_usage,
        )
        self._form = form

    def _first_event(self, prompt_index: int, index: int) -> bytes:
        return self._event(ChatChunkChoice(index, ChatDelta("assistant", ""), None, None))

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        before = b'{"index":%d,"delta":{"content":' % index
        return before, b'},"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def _part(self, index: int, choice: CompletionOutput) -> msgspec.Struct:
        new = None if choice.new_logprobs is None else list(choice.new_logprobs)
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=choice.new_text or None),
            logprobs=self._form.logprobs(new),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


class ChatEndpoint(GenerationEndpoint):
    """Answers ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    prompt_field = "messages"

    async def read_form(self, body: bytes, request_id: str) -> Form:
        """See ``GenerationEndpoint``."""
        request = parse_body(ChatRequest, body)
        request.check_stream_options()
        target = self.state.resolve(request.model)
        sampling = to_sampling_params(
            request,
            self.state.engine.get_model_info().default_sampling,
            default_max_tokens=None,
            logprobs=request.num_logprobs,
            logprobs_field="top_logprobs",
        )
        prompt = await self._render(request)
        salt = request.cache_salt or ""
        generation = Generation(request_id, [prompt], sampling, target.adapter_name, salt)
        return ChatForm(request, generation, target.shown_name)

    async def _render(self, request: ChatRequest) -> list[int]:
        arguments = request.chat_template_kwargs or {}
        for name in arguments:
            if name in _RESERVED_ARGUMENTS:
                param = f"chat_template_kwargs.{name}"
                raise NotServedError(f"{param} cannot be set by a request", param=param)
        tokenizer = self.state.engine.tokenizer
        text = tokenizer.apply_chat_template(template_messages(request.messages), **arguments)
        # The template has written the special tokens already.
        return await tokenizer.encode_async(text, add_special_tokens=False)
