"""``POST /v1/chat/completions``: a conversation in, the next message out."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import NotServedError
from ..frontend.outputs import CompletionOutput, RequestOutput, TokenCandidates
from .body import parse_body, show, wrong_type
from .endpoint import GenerationEndpoint
from .errors import HttpError
from .generation_request import GenerationFields, ParsedRequest
from .responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Envelope,
    chat_logprobs,
)
from .sse import ChunkEncoder

_ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call", "tool_calls")
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


class ChatRequest(GenerationFields):
    """A conversation that the model continues."""

    messages: list[Any]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token, or None. Raises ``HttpError`` for a count without the switch."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise HttpError(
                400,
                f"top_logprobs is {self.top_logprobs} but logprobs is not true",
                code="invalid_value",
                param="top_logprobs",
            )
        return None


class ChatEndpoint(GenerationEndpoint):
    """Answers ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    prompt_field = "messages"

    async def parse(self, body: bytes, request_id: str) -> ParsedRequest:
        request = parse_body(ChatRequest, body)
        request.check_stream_options()
        target = self.state.resolve(request.model)
        sampling = request.sampling_params(
            self.state.engine.get_model_info().default_sampling,
            default_max_tokens=None,
            logprobs=request.num_logprobs,
            logprobs_field="top_logprobs",
        )
        prompt = await self._render(request)
        object_name = _CHUNK_OBJECT if request.stream else _OBJECT
        return ParsedRequest(
            body=request,
            envelope=Envelope(request_id, object_name, int(time.time()), target.shown_name),
            adapter_name=target.adapter_name,
            prompts=[prompt],
            sampling=sampling,
        )

    def chunk_encoder(self, request: ParsedRequest) -> ChunkEncoder:
        return _ChatChunks(request)

    def choices(
        self, request: ParsedRequest, prompt_index: int, output: RequestOutput
    ) -> list[msgspec.Struct]:
        return [
            ChatChoice(
                index=choice.index,
                message=ChatMessage(choice.text),
                logprobs=_logprobs(choice.logprobs, request.sampling.logprobs),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in output.outputs
        ]

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


class _ChatChunks(ChunkEncoder):
    """The events of one chat stream."""

    __slots__ = ("_num_top_logprobs",)

    def __init__(self, request: ParsedRequest) -> None:
        super().__init__(request)
        self._num_top_logprobs = request.sampling.logprobs

    def _first_event(self, prompt_index: int, index: int) -> bytes:
        return self._event(ChatChunkChoice(index, ChatDelta("assistant", ""), None, None))

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        before = b'{"index":%d,"delta":{"content":' % index
        return before, b'},"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def _part(self, index: int, choice: CompletionOutput) -> msgspec.Struct:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=choice.new_text or None),
            logprobs=_logprobs(choice.new_logprobs, self._num_top_logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


def _logprobs(tokens: Sequence[TokenCandidates] | None, num_top: int | None) -> ChatLogprobs | None:
    """Return ``tokens`` in the form of this endpoint, if log-probabilities are asked for."""
    return None if num_top is None else chat_logprobs(tokens or (), num_top=num_top)


def template_messages(messages: list[Any]) -> list[dict[str, str]]:
    """Return the messages as a chat template takes them, every content one string.

    Raises ``HttpError`` naming the message and the field that is wrong, and ``NotServedError`` for
    tool calls and contents that are not text.
    """
    if not messages:
        raise HttpError(400, "messages is empty", code="empty_messages", param="messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(messages)]


def _message(value: object, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(path, value, "an object with role and content")
    fields = dict(value)
    role, content, name = (fields.pop(key, None) for key in ("role", "content", "name"))
    _check_role(role, f"{path}.role")
    for field, extra in fields.items():
        if field not in _EMPTY_FIELDS:
            raise HttpError(
                400,
                f"{path}.{field[:40]} is not a field of a message that is served here",
                code="unknown_field",
                param=f"{path}.{field[:40]}",
            )
        if extra not in (None, [], {}):
            raise NotServedError(f"{path}.{field} is not served", param=f"{path}.{field}")
    # OpenAI's "developer" took the place of "system"; the templates of models know the latter.
    message = {"role": "system" if role == "developer" else role}
    message["content"] = _text(content, f"{path}.content")
    if name is not None:
        if not isinstance(name, str):
            raise wrong_type(f"{path}.name", name, "a string")
        message["name"] = name
    return message


def _check_role(role: object, path: str) -> None:
    if isinstance(role, str) and role in _TOOL_ROLES:
        raise NotServedError(
            f"{path} is {role!r}: calling tools and functions is not served", param=path
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong_type(path, role, "one of " + ", ".join(_ROLES))


def _text(content: object, path: str) -> str:
    """Join the text parts of ``content``."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(path, content, "a string or a list of text parts")
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(path, part, 'an object like {"type": "text", "text": "…"}')
    kind = part.get("type")
    if kind != "text":
        raise NotServedError(
            f'{path}.type is {show(kind)}, only "text" is served', param=f"{path}.type"
        )
    for field in part:
        if field not in ("type", "text"):
            raise HttpError(
                400,
                f"{path}.{field[:40]} is not a field of a text part",
                code="unknown_field",
                param=f"{path}.{field[:40]}",
            )
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong_type(f"{path}.text", text, "a string")
    return text
