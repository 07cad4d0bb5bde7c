"""``POST /v1/chat/completions``: generates the next message of a conversation."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import msgspec

from ..frontend.inputs import MadePrompt, text_limit
from ..frontend.outputs import CompletionOutput, RequestOutput, TokenCandidates
from ..frontend.template_limits import render_in_time
from ..sampling import SamplingParams
from ..tools.parts import AnswerParser, joined
from ..tools.reader import AnswerReader
from .body import given, is_large, parse_body
from .chat_messages import ConversationFields, ToolFields
from .endpoint import GenerationEndpoint, OpenRecord
from .engine_port import ConventionsPort
from .errors import InvalidValueError
from .fields import MESSAGE_FIELDS
from .generation_request import GenerationFields, ParsedRequest
from .message_schema import MessagesField
from .responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Envelope,
    PromptLogprobs,
    TokenIds,
    chat_logprobs,
    prompt_logprobs,
)
from .sse import ChunkEncoder, StreamEncoder

_OBJECT = "chat.completion"
_CHUNK_OBJECT = "chat.completion.chunk"


class ChatRequest(GenerationFields, ConversationFields, ToolFields):
    """A conversation that the model continues."""

    nested: ClassVar = GenerationFields.nested | {"messages": MESSAGE_FIELDS}

    messages: MessagesField
    logprobs: bool | None = given("Return the log-probability of each token.")
    top_logprobs: int | None = given("Also return those of this many of the most likely tokens.")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token, or None. Raises ``HttpError`` for a number alone."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidValueError(
                f"top_logprobs is {self.top_logprobs} but logprobs is not true", param="top_logprobs"
            )
        return None


class ChatEndpoint(GenerationEndpoint):
    """Answers ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    prompt_field = "messages"

    async def parse(self, body: bytes, record: OpenRecord) -> ParsedRequest:
        request = await parse_body(ChatRequest, body, self.state.unknown_fields)
        record.read(request.model, stream=bool(request.stream))
        return await self._parsed(request, record.request_id, is_large=is_large(body))

    async def _parsed(self, request: ChatRequest, request_id: str, *, is_large: bool) -> ParsedRequest:
        """Check a body that has been read. Raises ``RequestError``."""
        request.check_stream_options()
        request.check_scores()
        target = await self.state.resolve(request.model, request.mix)
        sampling = request.sampling_params(
            self.state.engine.get_model_info().default_sampling,
            default_max_tokens=None,
            logprobs=request.num_logprobs,
            logprobs_field="top_logprobs",
        )
        self.check_num_sequences(1, sampling.n)
        reader = AnswerReader(
            request.offered_tools(),
            is_live=bool(request.stream),
            splits_reasoning=request.separate_reasoning is not False,
            shows_reasoning=request.include_reasoning is not False,
        )
        object_name = _CHUNK_OBJECT if request.stream else _OBJECT
        return ParsedRequest(
            body=request,
            envelope=Envelope(request_id, object_name, int(time.time()), target.shown_name),
            adapter=target.adapter,
            prompts=[partial(self._make_prompt, request, sampling, reader, is_large)],
            sampling=sampling,
            reader=reader,
        )

    async def _make_prompt(
        self,
        request: ChatRequest,
        sampling: SamplingParams,
        reader: AnswerReader,
        is_large: bool,
        conventions: ConventionsPort,
    ) -> MadePrompt:
        """Render the conversation. Raises ``RequestError``."""
        limits, variables = self.state.settings.limits, request.template_variables()
        if reader.tools is not None:
            variables["tools"] = reader.tools.definitions
        render = partial(request.render, conventions, request.messages, limits.max_json_items, variables)
        text = await render_in_time(render, limits.template, is_large=is_large)
        reader.check_prompt(text)
        tokenizer = conventions.tokenizer
        sampling = reader.begin(
            text, sampling, conventions.templates(), tokenizer.mark_ids, tokenizer.hides, tokenizer.token_text
        )
        # The template has written the special tokens already, unless the request says otherwise.
        token_ids = await tokenizer.encode_async(
            text,
            add_special_tokens=bool(request.add_special_tokens),
            limit=text_limit(sampling, self.state.engine.get_model_info().max_model_len),
        )
        return MadePrompt(token_ids, sampling)

    def stream_encoder(self, request: ParsedRequest) -> StreamEncoder:
        return _ChatChunks(request)

    def choices(
        self, request: ParsedRequest, prompt_index: int, output: RequestOutput
    ) -> list[msgspec.Struct]:
        return [self._choice(request, choice) for choice in output.outputs]

    def _choice(self, request: ParsedRequest, choice: CompletionOutput) -> ChatChoice:
        answer = joined(request.answers.whole(choice))
        return ChatChoice(
            index=choice.index,
            message=ChatMessage.of(answer),
            logprobs=_logprobs(choice.logprobs, request.sampling.logprobs),
            finish_reason=request.answers.finish_reason(choice.finish_reason, num_calls=len(answer.calls)),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if request.body.return_token_ids else msgspec.UNSET,
        )

    def prompt_logprobs(self, output: RequestOutput) -> PromptLogprobs:
        return prompt_logprobs(output)

    def prompt_token_ids(self, request: ParsedRequest, output: RequestOutput) -> TokenIds:
        return output.prompt_token_ids if request.body.return_token_ids else msgspec.UNSET


class _ChatChunks(ChunkEncoder):
    __slots__ = ("_num_calls", "_num_top_logprobs", "_parsers", "_reader")

    def __init__(self, request: ParsedRequest) -> None:
        super().__init__(request)
        self._num_top_logprobs = request.sampling.logprobs
        self._reader = request.answers
        self._parsers: dict[int, AnswerParser] = {}  # by choice
        self._num_calls: Counter[int] = Counter()  # by choice

    def encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        if self._reader.is_plain:
            return super().encode(prompt_index, output)
        events = b""
        self._count(prompt_index, output)
        for choice in output.outputs:
            index = choice.index
            if index not in self._parsers:
                self._parsers[index] = self._reader.parser()
                events += self._first_event(index, output)
            if index not in self._ended:
                events += self._parsed_events(index, choice)
        return events

    def _parsed_events(self, index: int, choice: CompletionOutput) -> bytes:
        """Return an event for each new part of the answer, and one for tokens or the end."""
        parser, has_ended = self._parsers[index], choice.finish_reason is not None
        parts = parser.feed(choice.new_text)
        if has_ended:
            self._ended.add(index)
            parts += self._reader.rest(parser, choice)
        self._num_calls[index] += sum(part.head is not None for part in parts)
        events = b"".join(
            self._event(ChatChunkChoice(index, ChatDelta.of(part), None, None)) for part in parts
        )
        if not (has_ended or (self._shows_tokens and choice.new_token_ids)):
            return events
        last = msgspec.structs.replace(
            self._part(index, choice),
            delta=ChatDelta(),
            finish_reason=self._reader.finish_reason(choice.finish_reason, num_calls=self._num_calls[index]),
        )
        return events + self._event(last)

    def _first_event(self, index: int, output: RequestOutput) -> bytes:
        first = ChatChunkChoice(index, ChatDelta("assistant", ""), None, None)
        if not self._with_token_ids:
            return self._event(first)
        return self._event(first, b',"prompt_token_ids":' + self._encode_json(output.prompt_token_ids))

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        before = b'{"index":%d,"delta":{"content":' % index
        return before, b'},"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def _part(self, index: int, choice: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=choice.new_text or None),
            logprobs=_logprobs(choice.new_logprobs, self._num_top_logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.new_token_ids if self._with_token_ids else msgspec.UNSET,
        )


def _logprobs(tokens: Sequence[TokenCandidates] | None, num_top: int | None) -> ChatLogprobs | None:
    """Return ``tokens`` in the form of this endpoint, if log-probabilities are asked for."""
    return None if num_top is None else chat_logprobs(tokens or (), num_top=num_top)
