"""The body of ``/v1/responses``: its fields, and which of them are accepted or refused."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from .body import RequestModel, given
from .fields import NO_HOSTED_TOOLS, TEXT_ALONE, FieldTable, RefusedField
from .generation_request import SamplingFields

_STATELESS = "nothing is stored; send the whole conversation as input"

RESPONSES_ACCEPTED: Mapping[str, str] = {
    "include": "results of hosted tools do not occur, and reasoning is not encrypted",
    "max_tool_calls": "limits hosted tools, which are not served",
}
RESPONSES_REFUSED: Mapping[str, RefusedField] = {
    "store": RefusedField(_STATELESS, (False,)),
    "previous_response_id": RefusedField(_STATELESS),
    "conversation": RefusedField(_STATELESS),
    "background": RefusedField("the answer is not stored; write stream", (False,)),
    "prompt": RefusedField("templates of prompts are not stored; write instructions and input"),
    "truncation": RefusedField("items are not left out; send fewer", ("disabled",)),
    "context_management": RefusedField("items are not left out; send fewer", ([],)),
    "messages": RefusedField("write input, or send messages to /v1/chat/completions"),
    "max_tokens": RefusedField("write max_output_tokens"),
    "max_completion_tokens": RefusedField("write max_output_tokens"),
    "response_format": RefusedField("write text.format"),
    "reasoning_effort": RefusedField("write reasoning.effort"),
    "n": RefusedField("a response has one answer", (1,)),
    "top_logprobs": RefusedField("write logprobs to /v1/chat/completions", (0,)),
}

_ITEM_FIELDS = FieldTable(
    served=(*("type", "role", "content", "summary"), *("call_id", "name", "arguments", "output")),
    accepted={
        "id": "names the item",
        "status": "is always that of a complete item",
        "phase": "no chat template uses it",
        "namespace": "no chat template uses it",
        "encrypted_content": "reasoning is not encrypted",
    },
    refused={"input": RefusedField("custom tools are not served")},
    nested={
        name: FieldTable(
            served=("type", "text", "refusal"),
            accepted={
                "annotations": "describes the text's source",
                "logprobs": "no chat template uses it",
                "cache_control": "KV is always cached",
            },
            refused={
                source: RefusedField(TEXT_ALONE)
                for source in ("image_url", "file_id", "file_data", "file_url", "input_audio")
            },
        )
        for name in ("content", "output")
    },
)
_TOOL_FIELDS = FieldTable(
    served=("type", "name", "description", "parameters", "strict"),
    accepted={"defer_loading": "all functions are shown to the model at once"},
    refused={
        name: RefusedField(NO_HOSTED_TOOLS)
        for name in ("server_label", "vector_store_ids", "container", "environment")
    },
)

InputField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text of the user, or items: messages, calls of functions, their outputs "
            "and reasoning.",
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "type": {
                                "enum": ["message", "function_call", "function_call_output", "reasoning"]
                            },
                            "role": {"enum": ["system", "developer", "user", "assistant"]},
                        },
                    },
                },
            ],
        }
    ),
]


class ReasoningOptions(RequestModel):
    """How much the model reasons."""

    effort: str | None = given("A variable of the chat template, such as low.")


class TextOptions(RequestModel):
    """The form of the answer's text."""

    format: dict[str, Any] | None = given("text, json_object, or json_schema with a schema.")
    verbosity: str | None = given("A variable of the chat template, such as low.")


class ResponsesRequest(SamplingFields):
    """A text or a list of items that the model answers. Nothing is stored."""

    accepted: ClassVar = RESPONSES_ACCEPTED
    refused: ClassVar = RESPONSES_REFUSED
    nested: ClassVar = {
        "input": _ITEM_FIELDS,
        "tools": _TOOL_FIELDS,
        **SamplingFields.nested,
        "reasoning": FieldTable(
            served=tuple(ReasoningOptions.model_fields),
            accepted={
                "summary": "reasoning is returned whole",
                "generate_summary": "reasoning is returned whole",
            },
            refused={},
        ),
        "text": FieldTable(served=tuple(TextOptions.model_fields), accepted={}, refused={}),
        "stream_options": FieldTable(
            served=(), accepted={"include_obfuscation": "events are not padded"}, refused={}
        ),
    }

    input: InputField
    instructions: str | None = given("A system message before the input.")
    tools: list[dict[str, Any]] | None = given("Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = given("auto, none, required, or one function.")
    parallel_tool_calls: bool | None = given("Allow several calls; default: true.")
    text: TextOptions | None = given("The form of the text.")
    reasoning: ReasoningOptions | None = given("How much the model reasons.")
    max_output_tokens: int | None = given("Most tokens of the answer; default: what fits.")
    stream_options: dict[str, Any] | None = given("Nothing in it has an effect.")
    metadata: dict[str, Any] | None = given("Returned with the answer.")
    chat_template_kwargs: dict[str, Any] | None = given("Variables of the chat template.")
