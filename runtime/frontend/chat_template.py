"""A model's chat template, rendered as transformers renders it, but without transformers.

Templates are programs of whoever published the model, so they run in Jinja's sandbox. What they
may use beside Jinja's own is what transformers documents for them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# What a template raises that does not fit the messages, on purpose or not.
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


class ChatTemplate:
    """One template or several by name, and the special tokens that they can name."""

    def __init__(
        self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]
    ) -> None:
        """``special_tokens``: by variable, such as ``bos_token``."""
        self.source = source
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """Return the prompt for ``messages``. Raises one of ``RENDER_ERRORS``."""
        template = _compiled(self._chosen(has_tools=variables.get("tools") is not None))
        return template.render(
            {
                "tools": None,
                "documents": None,
                **self._special_tokens,
                **variables,
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _chosen(self, *, has_tools: bool) -> str:
        """The template for a conversation, where there are several the one of the right name."""
        if isinstance(self.source, str):
            return self.source
        templates = self.source or {}
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in templates:
                return templates[name]
        raise ValueError(f"none of the model's templates is the default: {sorted(templates)}")


class _SafeNamespace(Namespace):
    """Jinja's ``namespace``, without the names that mean something to Python."""

    def __init__(self, /, *args: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace takes no attribute {name!r}")
        super().__setitem__(name, value)


class _SafeDict:
    """What templates call ``dict``: makes them, and hands out no method that changes one."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)


class _GenerationTag(Extension):
    """``{% generation %}`` around what a model has said: marks for training, here just text."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
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
    # Jinja's own filter escapes what HTML gives a meaning.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
