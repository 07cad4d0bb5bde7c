"""The body of ``/v1/messages``: its fields, and which of them are accepted or refused."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from .body import RequestModel, given
from .fields import NO_HOSTED_TOOLS, FieldTable, RefusedField
from .generation_request import LORA_FIELD, LORA_FIELDS, LoraPart

ANTHROPIC_ACCEPTED: Mapping[str, str] = {
    "cache_control": "KV is always cached",
    "inference_geo": "the server is where it is",
    "betas": "what a body may contain does not depend on it",
}
ANTHROPIC_REFUSED: Mapping[str, RefusedField] = {
    "container": RefusedField(NO_HOSTED_TOOLS),
    "mcp_servers": RefusedField(NO_HOSTED_TOOLS, ([],)),
    "context_management": RefusedField("messages are not left out; send fewer", ({},)),
    "input": RefusedField("write messages, or send input to /v1/responses"),
    "stop": RefusedField("write stop_sequences"),
    "max_completion_tokens": RefusedField("write max_tokens"),
    "response_format": RefusedField("write output_config.format"),
}
_BLOCK = FieldTable(
    served=(
        *("type", "text", "thinking", "id", "name", "input", "tool_use_id", "content"),
        *("source",),  # of what is refused by its type
    ),
    accepted={
        "cache_control": "KV is always cached",
        "citations": "describes the text's source",
        "signature": "reasoning is not signed",
        "data": "reasoning that is hidden is not read",
        "is_error": "the content says it",
        "caller": "is always the model itself",
    },
    refused={},
)
_MESSAGE = FieldTable(
    served=("role", "content"),
    accepted={
        "id": "names the message",
        "type": "is always that of a message",
        "model": "the request names the model",
        "stop_reason": "is always that of a complete message",
        "stop_sequence": "is always that of a complete message",
        "usage": "counts tokens of an earlier answer",
    },
    refused={},
    nested={"content": _BLOCK},
)
_TOOL = FieldTable(
    served=("type", "name", "description", "input_schema", "strict"),
    accepted={
        "cache_control": "KV is always cached",
        "eager_input_streaming": "arguments are always streamed",
        "input_examples": "no chat template uses it",
        "defer_loading": "all functions are shown to the model at once",
        "allowed_callers": "only the model calls functions",
    },
    refused={},
)


class ThinkingOptions(RequestModel):
    """Whether the model reasons first."""

    type: str | None = given("enabled, disabled, or adaptive: as the chat template does.")


class OutputOptions(RequestModel):
    """The form of the answer."""

    format: dict[str, Any] | None = given("json_schema with a schema.")
    effort: str | None = given("A variable of the chat template, reasoning_effort.")


class AnthropicRequest(RequestModel):
    """A conversation that the model continues, in Anthropic's form."""

    accepted: ClassVar = ANTHROPIC_ACCEPTED
    refused: ClassVar = ANTHROPIC_REFUSED
    nested: ClassVar = {
        "messages": _MESSAGE,
        "tools": _TOOL,
        "lora": LORA_FIELDS,
        "thinking": FieldTable(
            served=tuple(ThinkingOptions.model_fields),
            accepted={
                "budget_tokens": "is a target, and no chat template uses it",
                "display": "reasoning is returned whole",
            },
            refused={},
        ),
        "output_config": FieldTable(served=tuple(OutputOptions.model_fields), accepted={}, refused={}),
    }

    messages: Annotated[
        list[Any],
        WithJsonSchema(
            {
                "description": "Messages of user and assistant; a content is a text or blocks.",
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {"role": {"enum": ["user", "assistant"]}},
                },
            }
        ),
    ]
    model: str | None = given(
        "An adapter's name, base:adapter, or a name of the base model; default: the base model."
    )
    lora: list[LoraPart] | None = LORA_FIELD
    system: Annotated[
        Any,
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
        ),
    ] = given("The system message, a text or text blocks.")
    max_tokens: int | None = given("Most tokens of the answer; default: what fits.")
    stop_sequences: list[str] | None = given("Texts that end the answer; it is cut before them.")
    stream: bool | None = given("Answer with server-sent events.")
    temperature: float | None = given("0 is greedy; default, also of the next two: the model's.")
    top_p: float | None = given("Sample from the most likely tokens that together have this probability.")
    top_k: int | None = given("Sample from this many of the most likely tokens; 0 or -1 = all.")
    tools: list[dict[str, Any]] | None = given("Functions that the model may call.")
    tool_choice: dict[str, Any] | None = given("type auto, any, none, or tool with a name.")
    thinking: ThinkingOptions | None = given("Whether the model reasons first.")
    output_config: OutputOptions | None = given("The form of the answer.")
    cache_salt: str | None = given("Only requests with the same salt share KV.")
    chat_template_kwargs: dict[str, Any] | None = given("Variables of the chat template.")
