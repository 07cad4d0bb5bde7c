"""The schemas of a conversation and of a prompt, for the documentation."""

from typing import Annotated, Any

from pydantic import WithJsonSchema

ROLES = ("system", "developer", "user", "assistant", "tool")
# Text fields of a message that a template may write.
MESSAGE_STRINGS = ("name", "tool_call_id", "reasoning_content", "reasoning")

_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"description": "An object, or its JSON.", "type": ["string", "object", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
MessagesField = Annotated[
    list[Any],
    WithJsonSchema(
        {
            "description": "The conversation, for the model's chat template.",
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": list(ROLES)},
                    "content": {
                        "description": "Text; null only for the role assistant.",
                        "anyOf": [*_CONTENT["anyOf"], {"type": "null"}],
                    },
                    "tool_calls": {
                        "description": "For the role assistant.",
                        "anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}],
                    },
                    **{name: {"type": ["string", "null"]} for name in MESSAGE_STRINGS},
                },
                "required": ["role"],
            },
        }
    ),
]

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "A text or token ids, or an array of one of them.",
            "anyOf": [
                _TEXT,
                _TOKENS,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {"type": "array", "items": _TOKENS, "minItems": 1},
            ],
        }
    ),
]
