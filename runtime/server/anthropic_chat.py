"""Translates the body of ``/v1/messages`` to that of a chat. Pure."""

from collections.abc import Mapping
from typing import Any

from ..errors import NotServedError
from .anthropic_fields import AnthropicRequest
from .errors import HttpError
from .json_values import show, wrong_type
from .translation import string_of

# Fields of a chat, as errors name them, and the fields here that they come from.
FIELD_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_SAME_NAME = (
    *("model", "lora", "max_tokens", "stream", "temperature", "top_p", "top_k"),
    *("cache_salt", "chat_template_kwargs"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "disabled": False, "adaptive": None}


def chat_body_of(request: AnthropicRequest) -> dict[str, Any]:
    """Return the body of the chat that answers ``request``.

    Raises ``RequestError`` with the path of a field or a block that is not served.
    """
    body = {name: getattr(request, name) for name in _SAME_NAME}
    body["stop"] = request.stop_sequences
    body["messages"] = _messages(request)
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice)
    if request.thinking is not None and request.thinking.type is not None:
        if request.thinking.type not in _THINKING:
            wanted = "one of " + ", ".join(_THINKING)
            raise wrong_type("thinking.type", request.thinking.type, wanted)
        body["enable_thinking"] = _THINKING[request.thinking.type]
    if request.output_config is not None:
        body["reasoning_effort"] = request.output_config.effort
        body["response_format"] = _response_format(request.output_config.format)
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    return {name: value for name, value in body.items() if value is not None}


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.get("type") != "json_schema":
        raise wrong_type("output_config.format.type", form.get("type"), '"json_schema"')
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise NotServedError(
            f'{path}.type is {show(tool["type"])}, only "custom" is served: this server runs no tools',
            param=f"{path}.type",
        )
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        name = string_of(choice.get("name"), "tool_choice.name")
        return fields | {"tool_choice": {"type": "function", "function": {"name": name}}}
    if kind not in _CHOICES:
        raise wrong_type("tool_choice.type", kind, "one of auto, any, none, tool")
    return fields | {"tool_choice": _CHOICES[kind]}


def _messages(request: AnthropicRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if not request.messages:
        raise HttpError(400, "messages is empty", code="empty_messages", param="messages")
    if request.system:
        messages.append({"role": "system", "content": _texts(request.system, "system")})
    for index, value in enumerate(request.messages):
        path = f"messages[{index}]"
        if not isinstance(value, dict):
            raise wrong_type(path, value, "an object with role and content")
        content = value.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise wrong_type(f"{path}.content", blocks, "a string or a list of blocks")
        match value.get("role"):
            case "user":
                messages += _user(blocks, f"{path}.content")
            case "assistant":
                messages.append(_assistant(blocks, f"{path}.content"))
            case role:
                raise wrong_type(f"{path}.role", role, "user or assistant")
    return messages


def _user(blocks: list[Any], path: str) -> list[dict[str, Any]]:
    """Return the messages of a user's turn: first the results of calls, each one message."""
    results, texts = [], []
    for index, block in enumerate(blocks):
        at = f"{path}[{index}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": string_of(block.get("tool_use_id"), f"{at}.tool_use_id"),
                    "content": _texts(block.get("content") or "", f"{at}.content"),
                }
            )
        else:
            texts.append(_text(block, at))
    return [*results, {"role": "user", "content": texts}] if texts or not results else results


def _assistant(blocks: list[Any], path: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts, calls, thoughts = [], [], []
    for index, block in enumerate(blocks):
        at = f"{path}[{index}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "tool_use":
                name = string_of(block.get("name"), f"{at}.name")
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise wrong_type(f"{at}.input", arguments, "an object")
                call_id = string_of(block.get("id"), f"{at}.id")
                function = {"name": name, "arguments": arguments}
                calls.append({"type": "function", "id": call_id, "function": function})
            case "thinking":
                thoughts.append(string_of(block.get("thinking"), f"{at}.thinking"))
            case "redacted_thinking":
                pass  # its text is not known
            case _:
                texts.append(_text(block, at))
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if texts:
        message["content"] = texts
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(value: object, path: str) -> Any:
    """Return a content that is text, as a chat has it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(path, value, "a string or a list of text blocks")
    return [_text(block, f"{path}[{i}]") for i, block in enumerate(value)]


def _text(block: object, path: str) -> dict[str, str]:
    if not isinstance(block, dict):
        raise wrong_type(path, block, "an object with type")
    if block.get("type") != "text":
        raise NotServedError(
            f"{path}.type is {show(block.get('type'))}: this server takes text, and calls of "
            "functions in their places",
            param=f"{path}.type",
        )
    return {"type": "text", "text": string_of(block.get("text"), f"{path}.text")}
