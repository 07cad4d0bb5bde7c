"""Translates the body of ``/v1/responses`` to that of a chat. Pure."""

from collections.abc import Mapping
from typing import Any

from ..errors import NotServedError
from .errors import HttpError
from .json_values import show, wrong_type
from .response_fields import ResponsesRequest
from .translation import string_of

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")
_SAME_NAME = (
    *("model", "lora", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop"),
    *("cache_salt", "predicted_output_tokens", "chat_template_kwargs"),
)
# Fields of a chat, as errors name them, and the fields here that they come from.
FIELD_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "messages": "input",
}


def chat_body(request: ResponsesRequest) -> dict[str, Any]:
    """Return the body of the chat that answers ``request``.

    Raises ``RequestError`` with the path of a field or an item that is not served.
    """
    body = {name: getattr(request, name) for name in _SAME_NAME}
    body["max_completion_tokens"] = request.max_output_tokens
    body["messages"] = _messages(request)
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    body["tool_choice"] = _tool_choice(request.tool_choice)
    if request.reasoning is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.text is not None:
        body["verbosity"] = request.text.verbosity
        body["response_format"] = _response_format(request.text.format)
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    return {name: value for name, value in body.items() if value is not None}


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise NotServedError(
            f'{path}.type is {show(tool.get("type"))}, only "function" is served: this server runs no tools',
            param=f"{path}.type",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_tool_choice(one) if isinstance(one, dict) else one for one in choice["tools"]]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if kind != "function":
        raise NotServedError(
            f'tool_choice.type is {show(kind)}, only "function" and "allowed_tools" are served',
            param="tool_choice.type",
        )
    return {"type": kind, "function": {"name": choice.get("name")}}


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") != "json_schema":
        return dict(form)
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    value = request.input
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(value, str) and value:
        return [*messages, {"role": "user", "content": value}]
    if value in ("", []):
        raise HttpError(400, "input is empty", code="empty_messages", param="input")
    if not isinstance(value, list):
        raise wrong_type("input", value, "a string or a list of items")
    for index, item in enumerate(value):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: object, path: str) -> None:
    """Add an item; reasoning, text and calls of one turn are one message."""
    if not isinstance(item, dict):
        raise wrong_type(path, item, "an object with type")
    match item.get("type", "message"):
        case "message":
            message = _message(item, path)
            last = messages[-1] if messages else {}
            if message["role"] == "assistant" and last.keys() == {"role", "reasoning_content"}:
                message = last | message
                messages.pop()
            messages.append(message)
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(_call(item, path))
        case "function_call_output":
            output = _texts(item.get("output"), f"{path}.output")
            call_id = string_of(item.get("call_id"), f"{path}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case "reasoning":
            content = item.get("content")
            thoughts = _texts(content, f"{path}.content", ("reasoning_text",)) if content else ""
            if thoughts:  # a summary is no text of the model
                text = thoughts if isinstance(thoughts, str) else _joined(thoughts)
                messages.append({"role": "assistant", "reasoning_content": text})
        case kind:
            raise NotServedError(
                f"{path}.type is {show(kind)}; message, function_call, function_call_output and "
                "reasoning are served",
                param=f"{path}.type",
            )


def _message(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise wrong_type(f"{path}.role", role, "one of " + ", ".join(_ROLES))
    return {"role": role, "content": _texts(item.get("content"), f"{path}.content")}


def _call(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = {name: string_of(item.get(name), f"{path}.{name}") for name in ("name", "arguments")}
    call_id = string_of(item.get("call_id"), f"{path}.call_id")
    return {"type": "function", "id": call_id, "function": function}


def _texts(value: object, path: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> Any:
    """Return a content, a string or parts, as a chat has it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(path, value, "a string or a list of parts")
    return [_part(part, f"{path}[{i}]", kinds) for i, part in enumerate(value)]


def _part(part: object, path: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise wrong_type(path, part, "an object with type and text")
    kind = part.get("type")
    if kind == "refusal":  # what the model wrote, all the same
        return {"type": "text", "text": string_of(part.get("refusal"), f"{path}.refusal")}
    if kind not in kinds:
        raise NotServedError(
            f"{path}.type is {show(kind)}: this server takes text only", param=f"{path}.type"
        )
    return {"type": "text", "text": string_of(part.get("text"), f"{path}.text")}


def _joined(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)
