"""Conversations: renders messages with the model's chat template, and reads a body's tools."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import pydantic_core
from pydantic import WithJsonSchema

from ..errors import NotServedError, RequestError
from ..tools.call_format import arguments_schema
from ..tools.offer import CallMode, Tools
from .body import RequestModel, check_num_items, given
from .engine_port import RendererPort
from .errors import HttpError, InvalidValueError
from .json_values import show, wrong_type
from .message_schema import MESSAGE_STRINGS, ROLES

# Occurs in no conversation: if it is missing in a rendered text, the template ignores the field.
_OTHER_RESULT = "\x02other\x03"
_OTHER_CALLS = [{"type": "function", "id": "other", "function": {"name": _OTHER_RESULT, "arguments": {}}}]

# Arguments of the renderer itself; a request can set only the template's own variables.
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


class ConversationFields(RequestModel):
    """The fields of a conversation beside its messages."""

    add_generation_prompt: bool | None = given(
        "Begin a new assistant message; default: true, unless one is continued."
    )
    continue_final_message: bool | None = given(
        "Leave the last message open, so that the model continues it."
    )
    chat_template_kwargs: dict[str, Any] | None = given("Variables of the chat template.")

    def render(
        self,
        tokenizer: RendererPort,
        values: list[Any],
        max_json_items: int,
        own_variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render ``values``, the body's messages, with the chat template, and return the prompt.

        ``max_json_items``: of the arguments of a tool call. ``own_variables``: of the template,
        from other fields; ``chat_template_kwargs`` takes precedence.

        Raises ``RequestError`` for a malformed message, for variables that a request must not set,
        and if the template would leave out tool calls or their results.
        """
        variables = {**own_variables, **self._variables()}
        messages = template_messages(values, max_json_items)
        text = tokenizer.apply_chat_template(messages, **variables)
        for what, changed in _with_other_tools(messages):
            if _renders_as(text, tokenizer, changed, variables):
                raise NotServedError(
                    f"messages has {what}, which the model's chat template leaves out", param="messages"
                )
        return text

    def _variables(self) -> dict[str, Any]:
        variables = dict(self.chat_template_kwargs or {})
        for name in _RESERVED_ARGUMENTS & variables.keys():
            param = f"chat_template_kwargs.{name}"
            raise NotServedError(f"{param} cannot be set by a request", param=param)
        is_continued = bool(self.continue_final_message)
        if is_continued and self.add_generation_prompt:
            raise InvalidValueError(
                "continue_final_message and add_generation_prompt are both true; set only one of them",
                param="continue_final_message",
            )
        variables["continue_final_message"] = is_continued
        variables["add_generation_prompt"] = not is_continued and self.add_generation_prompt is not False
        return variables


def _with_other_tools(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield variants of the messages, each changed in a part that not every template writes."""
    if any("tool_calls" in message for message in messages):
        changed = [
            message if "tool_calls" not in message else {**message, "tool_calls": _OTHER_CALLS}
            for message in messages
        ]
        yield "tool_calls", changed
    if any(message["role"] == "tool" for message in messages):
        changed = [
            message if message["role"] != "tool" else {**message, "content": _OTHER_RESULT}
            for message in messages
        ]
        yield 'messages of the role "tool"', changed


def _renders_as(
    text: str, tokenizer: RendererPort, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> bool:
    try:
        return tokenizer.apply_chat_template(messages, **variables) == text
    except RequestError:  # the template has read what it refuses
        return False


def template_messages(messages: list[Any], max_json_items: int) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them, with each content as one string.

    ``max_json_items``: of the arguments of a tool call, which are JSON in a string.
    Fields that are not served must be removed before. Raises ``HttpError`` with the path of the
    wrong field, and ``NotServedError`` for contents that are not text.
    """
    if not messages:
        raise HttpError(400, "messages is empty", code="empty_messages", param="messages")
    read: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of called functions, by the id of the call
    for index, item in enumerate(messages):
        message = _message(item, f"messages[{index}]", max_json_items)
        for call in message.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            # Some templates need the function's name, which OpenAI's messages leave out.
            message.setdefault("name", names[message["tool_call_id"]])
        read.append(message)
    return read


def _message(value: object, path: str, max_json_items: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, value, "an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong_type(f"{path}.role", role, "one of " + ", ".join(ROLES))
    # OpenAI's "developer" replaced "system"; chat templates know "system".
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = value.get("content")
    is_silent = content is None and role == "assistant"  # templates need a string
    message["content"] = "" if is_silent else _text(content, f"{path}.content")
    for name in MESSAGE_STRINGS:
        if value.get(name) is not None:
            message[name] = _string(value[name], f"{path}.{name}")
    calls = value.get("tool_calls")
    if calls is not None and calls != []:  # some clients send an empty list for none
        message["tool_calls"] = _tool_calls(calls, role, f"{path}.tool_calls", max_json_items)
    return message


def _tool_calls(value: object, role: str, path: str, max_json_items: int) -> list[dict[str, Any]]:
    if role != "assistant":
        raise InvalidValueError(
            f"{path} is given for the role {role!r}; only assistant messages have it", param=path
        )
    if not isinstance(value, list):
        raise wrong_type(path, value, "a list of calls")
    return [_tool_call(item, f"{path}[{i}]", max_json_items) for i, item in enumerate(value)]


def _tool_call(value: object, path: str, max_json_items: int) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise wrong_type(path, value, "an object with id, type and function")
    call: dict[str, Any] = {"type": "function"}
    if value.get("type", "function") != "function":
        raise NotServedError(
            f'{path}.type is {show(value["type"])}, only "function" is served', param=f"{path}.type"
        )
    if value.get("id") is not None:
        call["id"] = _string(value["id"], f"{path}.id")
    call["function"] = {
        "name": _string(function.get("name"), f"{path}.function.name"),
        "arguments": _arguments(function.get("arguments"), f"{path}.function.arguments", max_json_items),
    }
    return call


def _arguments(value: object, path: str, max_json_items: int) -> dict[str, Any]:
    """Return a call's arguments as an object, which templates need; clients send it as JSON."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        if len(value) > max_json_items:  # usually not
            check_num_items(value.encode(errors="replace"), max_json_items)
        try:
            value = pydantic_core.from_json(value)
        except ValueError:
            raise wrong_type(path, value, "the JSON of an object") from None
    if not isinstance(value, dict):
        raise wrong_type(path, value, "an object, or its JSON")
    return value


def _text(content: object, path: str) -> str:
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
            f'{path}.type is {show(kind)}: this server takes text only ("text")', param=f"{path}.type"
        )
    return _string(part.get("text"), f"{path}.text")


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(path, value, "a string")
    return value


MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_CHOICES = ("none", "auto", "required")

_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"description": "A JSON schema.", "type": ["object", "null"]},
        "strict": {"description": "Arguments of its calls are valid.", "type": ["boolean", "null"]},
    },
    "required": ["name"],
}
ToolsField = Annotated[
    list[Any] | None,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
                        "required": ["type", "function"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
ToolChoiceField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(_CHOICES)},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
                {"type": "null"},
            ]
        }
    ),
]


class ToolFields(RequestModel):
    """The fields about tools and reasoning."""

    tools: ToolsField = given("Functions that the model can call; default: none.")
    tool_choice: ToolChoiceField = given(
        'Whether the answer calls: "none", "auto", "required", or one function; default: "auto" with tools.'
    )
    parallel_tool_calls: bool | None = given("Whether it has several calls; default: true.")
    reasoning_effort: str | None = given(
        "A variable of the chat template; none also sets enable_thinking to false."
    )
    verbosity: str | None = given("A variable of the chat template.")
    enable_thinking: bool | None = given("A variable of the chat template.")
    separate_reasoning: bool | None = given(
        "Return reasoning beside the content, if the model marks it; default: true."
    )
    include_reasoning: bool | None = given("Return reasoning at all; default: true.")

    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template that are fields."""
        found: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            found["enable_thinking"] = False
        for name in ("reasoning_effort", "verbosity", "enable_thinking"):
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        return found

    def offered_tools(self) -> Tools | None:
        """Return the tools, or None if the answer can call none of them.

        Raises ``RequestError`` that names the field.
        """
        functions: dict[str, dict[str, Any]] = {}
        for index, one in enumerate(self._listed()):
            function = _function(one, f"tools[{index}]")
            if function["name"] in functions:
                raise InvalidValueError(f"tools has two functions named {show(function['name'])}", "tools")
            functions[function["name"]] = function
        mode, names = self._choice(list(functions))
        if mode is None:
            return None
        return Tools(
            definitions=[_definition(one) for one in functions.values()],
            mode=mode,
            callable_names=names,
            parameters={name: arguments_schema(one.get("parameters")) for name, one in functions.items()},
            strict_names=frozenset(name for name, one in functions.items() if one.get("strict")),
            is_parallel=self.parallel_tool_calls is not False,
        )

    def _listed(self) -> list[Any]:
        tools = self.tools or []
        if len(tools) > MAX_TOOLS:
            raise InvalidValueError(f"tools has {len(tools)} functions, at most {MAX_TOOLS}", "tools")
        return tools

    def _choice(self, names: list[str]) -> tuple[CallMode | None, list[str]]:
        choice = self.tool_choice
        if choice is None:
            choice = "auto" if names else "none"
        wanted = "one of " + ", ".join(_CHOICES) + ", or an object that names a function"
        if isinstance(choice, str):
            if choice not in _CHOICES:
                raise wrong_type("tool_choice", choice, wanted)
            if choice == "none" or (choice == "auto" and not names):
                return None, []
            if not names:
                raise InvalidValueError('tool_choice is "required", but tools is empty', "tool_choice")
            return CallMode(choice), names
        if not isinstance(choice, dict):
            raise wrong_type("tool_choice", choice, wanted)
        if choice.get("type") == "allowed_tools":
            return self._allowed(choice.get("allowed_tools"), names)
        return CallMode.REQUIRED, [_chosen(choice, "tool_choice", names)]

    def _allowed(self, allowed: object, names: list[str]) -> tuple[CallMode, list[str]]:
        path = "tool_choice.allowed_tools"
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise wrong_type(path, allowed, "an object with mode and tools")
        if allowed.get("mode", "auto") not in ("auto", "required"):
            raise wrong_type(f"{path}.mode", allowed["mode"], "auto or required")
        chosen = [_chosen(one, f"{path}.tools[{i}]", names) for i, one in enumerate(allowed["tools"])]
        if not chosen:
            raise InvalidValueError(f"{path}.tools is empty", f"{path}.tools")
        return CallMode(allowed.get("mode", "auto")), list(dict.fromkeys(chosen))


def _chosen(choice: object, path: str, names: list[str]) -> str:
    if not isinstance(choice, dict):
        raise wrong_type(path, choice, "an object with type and function")
    _check_type(choice, path)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise wrong_type(f"{path}.function.name", name, "a string")
    if name not in names:
        raise InvalidValueError(
            f"{path} names the function {show(name)}, which is not in tools", "tool_choice"
        )
    return name


def _definition(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of a function as chat templates take it."""
    kept = {name: one for name, one in function.items() if name != "strict" and one is not None}
    kept.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": kept}


def _function(value: object, path: str) -> dict[str, Any]:
    """Return the function in an item of tools, checked."""
    if not isinstance(value, dict):
        raise wrong_type(path, value, "an object with type and function")
    _check_type(value, path)
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"{path}.function", function, "an object with name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise wrong_type(f"{path}.function.name", name, 'a string of 1 to 128 letters, digits and "_.:-"')
    for field, types, wanted in (
        ("description", str, "a string"),
        ("parameters", dict, "an object, a JSON schema"),
        ("strict", bool, "a boolean"),
    ):
        if function.get(field) is not None and not isinstance(function[field], types):
            raise wrong_type(f"{path}.function.{field}", function[field], wanted)
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        raise wrong_type(f"{path}.function.parameters.type", kind, '"object"')
    return function


def _check_type(value: Mapping[str, Any], path: str) -> None:
    if value.get("type", "function") != "function":
        raise NotServedError(
            f'{path}.type is {show(value["type"])}, only "function" is served', param=f"{path}.type"
        )
