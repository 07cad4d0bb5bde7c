"""The fields of a body about tools and reasoning, and their checks."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

from ..errors import NotServedError, RequestError
from ..tools.call_format import arguments_schema
from ..tools.offer import CallMode, Tools
from .body import RequestModel, given
from .errors import HttpError
from .json_values import show, wrong_type

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
                raise _invalid(f"tools has two functions named {show(function['name'])}", "tools")
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
            raise _invalid(f"tools has {len(tools)} functions, at most {MAX_TOOLS}", "tools")
        return tools

    def _choice(self, names: list[str]) -> tuple[CallMode | None, list[str]]:
        """Return the mode and the functions that can be called."""
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
                raise _invalid('tool_choice is "required", but tools is empty', "tool_choice")
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
            raise _invalid(f"{path}.tools is empty", f"{path}.tools")
        return CallMode(allowed.get("mode", "auto")), list(dict.fromkeys(chosen))


def _chosen(choice: object, path: str, names: list[str]) -> str:
    """Return the function that ``choice`` names."""
    if not isinstance(choice, dict):
        raise wrong_type(path, choice, "an object with type and function")
    _check_type(choice, path)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise wrong_type(f"{path}.function.name", name, "a string")
    if name not in names:
        raise _invalid(f"{path} names the function {show(name)}, which is not in tools", "tool_choice")
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


def _invalid(message: str, param: str) -> RequestError:
    return HttpError(400, message, code="invalid_value", param=param)
