"""A model's chat template, rendered as transformers renders it, but without transformers.

A template is a program by the model's publisher, so it runs in Jinja's sandbox. It can use what
Jinja and transformers document for templates.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from .template_limits import leave_to_thread
from .template_sandbox import BoundedTemplate, Sandbox, bounded_filter

_END_MARK = "corun-here-ends-the-final-message "  # does not occur in messages
_MAX_COMPILED = 64
_MAX_TIME_CHARS = 256  # of a format
_PROBE = "corun-looks-for-this"
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# Errors of a template that does not fit the messages, raised on purpose or not.
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)

Render = Callable[..., str]  # from messages and variables to a prompt, see ``ChatTemplate.render``


class ChatTemplate:
    """One template, or several by name, with the special tokens that they can use."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        response_template: str | None = None,
    ) -> None:
        """Use a template.

        Args:
            source: The template, or several by name.
            special_tokens: By variable, such as ``bos_token``.
            response_template: JSON that says how answers are divided into fields, if it is known.
        """
        self.source = source
        self.response_template = response_template
        self.special_tokens = special_tokens
        self._takes_parts: dict[str, bool] = {}  # by source, once known

    @cached_property
    def text(self) -> str | None:
        """The text of all its templates; None if there is none."""
        source = self.source
        return source if source is None or isinstance(source, str) else "\n".join(source.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt for ``messages``; it ends with the last content if that is continued.

        Raises one of ``RENDER_ERRORS``.
        """
        if continue_final_message:
            marked = _with_end_marked(messages)
            text = self.render(marked, add_generation_prompt=add_generation_prompt, **variables)
            return _up_to_mark(text, messages[-1]["content"])
        source = self._chosen(has_tools=variables.get("tools") is not None)
        variables["add_generation_prompt"] = add_generation_prompt
        if self._wants_parts(source):
            messages = [_in_parts(message) for message in messages]
        return self._render(source, messages, variables)

    def _render(
        self, source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        return _compiled(source).render(
            {
                "tools": None,
                "documents": None,
                **self.special_tokens,
                **variables,
                "messages": [_with_reasoning(message) for message in messages],
            }
        )

    def _wants_parts(self, source: str) -> bool:
        """Whether a template writes contents only as lists of parts, not as strings.

        Templates of some multimodal models do, as they look for images in each message.
        """
        if source not in self._takes_parts:
            probe = {"role": "user", "content": _PROBE}
            self._takes_parts[source] = not self._writes(source, probe) and self._writes(
                source, _in_parts(probe)
            )
        return self._takes_parts[source]

    def _writes(self, source: str, message: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in self._render(source, [message], {"add_generation_prompt": True})
        except RENDER_ERRORS:
            return False

    def _chosen(self, *, has_tools: bool) -> str:
        """The template for a conversation: the only one, or the one with the right name."""
        if isinstance(self.source, str):
            return self.source
        templates = self.source or {}
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in templates:
                return templates[name]
        raise ValueError(f"the model has no default template; it has {sorted(templates)}")


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``message`` with its content as a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_end_marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with a mark at the end of the last one's content."""
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise ValueError("cannot continue the final message: it has no content")
    final = messages[-1]
    return [*messages[:-1], {**final, "content": final["content"] + _END_MARK}]


def _up_to_mark(text: str, content: str) -> str:
    before, mark, after = text.rpartition(_END_MARK.strip())
    if not mark or content.strip() not in before:
        raise ValueError("cannot continue the final message: the chat template alters its content")
    # A template that strips the space at the end of the mark also strips the end of a message.
    return before if after.startswith(" ") else before.rstrip()


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` with its reasoning under each name that templates read."""
    found = [message[name] for name in _REASONING_FIELDS if message.get(name) is not None]
    if not found:
        return dict(message)
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


class _SafeNamespace(Namespace):
    """Jinja's ``namespace``, without names that are special in Python."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # what it holds can be very long as text
        return "<Namespace>"


class _SafeDict:
    """``dict`` for templates: makes dictionaries, and has no methods that change one."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)


class _GenerationTag(Extension):
    """``{% generation %}`` around a model's answers: a mark for training, ignored here."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


_templates: dict[str, BoundedTemplate] = {}
_templates_lock = threading.Lock()


def _compiled(source: str) -> BoundedTemplate:
    """Return the template, compiled once; that takes long."""
    found = _templates.get(source)
    if found is None:
        leave_to_thread()
        found = _environment().template_of(source)
        with _templates_lock:
            if len(_templates) >= _MAX_COMPILED:
                del _templates[next(iter(_templates))]
            _templates[source] = found
    return found


@lru_cache(maxsize=1)
def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = bounded_filter("tojson", _to_json)
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_SafeDict(),
        namespace=_SafeNamespace,
    )
    return environment


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters that are special in HTML.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_TIME_CHARS:
        raise TemplateError(f"strftime_now has a format of more than {_MAX_TIME_CHARS} characters")
    return datetime.now().strftime(format)
