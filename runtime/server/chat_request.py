"""The body of ``POST /v1/chat/completions``."""

from typing import Any

from ..errors import NotServedError
from .body import kind_of, show
from .errors import HttpError
from .fields import GenerationFields

Message = dict[str, str]

_ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call", "tool_calls")


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


def template_messages(messages: list[Any]) -> list[Message]:
    """Return the messages as a chat template takes them, every content one string.

    Raises ``HttpError`` naming the message and the field that is wrong, and ``NotServedError`` for
    tool calls and contents that are not text.
    """
    if not messages:
        raise HttpError(400, "messages is empty", code="empty_messages", param="messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(messages)]


def _message(value: object, path: str) -> Message:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object with role and content")
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
            raise _wrong(f"{path}.name", name, "a string")
        message["name"] = name
    return message


def _check_role(role: object, path: str) -> None:
    if isinstance(role, str) and role in _TOOL_ROLES:
        raise NotServedError(
            f"{path} is {role!r}: calling tools and functions is not served", param=path
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(path, role, "one of " + ", ".join(_ROLES))


def _text(content: object, path: str) -> str:
    """Join the text parts of ``content``."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(path, content, "a string or a list of text parts")
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(path, part, 'an object like {"type": "text", "text": "…"}')
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
        raise _wrong(f"{path}.text", text, "a string")
    return text


def _wrong(path: str, value: object, wanted: str) -> HttpError:
    return HttpError(
        400,
        f"{path} is {show(value)} ({kind_of(value)}), must be {wanted}",
        code="invalid_type",
        param=path,
    )
