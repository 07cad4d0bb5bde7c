"""A model's chat template, rendered as transformers renders it, but without transformers.

A template is a program by the publisher of a model or of an adapter, and its input comes with
requests. So it runs in Jinja's sandbox, with limits on time and on text: each iteration of a loop,
each call and each filter checks the time, and what they make is measured (``template_limits``). It
can use what Jinja and transformers document for templates.
"""

import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn, TypeVar

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from .template_limits import (
    BUDGET,
    Budget,
    as_text,
    check_filter,
    check_method,
    check_power,
    check_product,
    check_remainder,
    check_sum,
    counted,
    joined,
    leave_to_thread,
    limits_here,
    made,
)

# Methods whose results are not measured: bytes, which no template needs, and texts of any length.
_REFUSED_METHODS = frozenset({"encode", "to_bytes", "translate"})
_OPERATORS = {"+": check_sum, "*": check_product, "%": check_remainder, "**": check_power}
# Tests that compare values.
_COMPARING_TESTS = frozenset(
    {
        *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in"),
        *("le", "lessthan", "lt", "ne"),
    }
)

_Node = TypeVar("_Node", bound=nodes.Node)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits."""

    intercepted_binops = frozenset(_OPERATORS)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.filters = {name: bounded_filter(name, filter_) for name, filter_ in self.filters.items()}
        tests: dict[str, Any] = self.tests
        for name in _COMPARING_TESTS:
            tests[name] = _bounded_test(tests[name])
        self.finalize = as_text

    def template_of(self, source: str) -> "BoundedTemplate":
        """Compile ``source``. Raises ``TemplateError``."""
        tree = _Bounds(self).visit(self.parse(source))
        return BoundedTemplate(self.from_string(tree))

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error that is being handled, with the template's line if it is of syntax.

        For others, Jinja makes frames of the template's lines. They refer to each other, and keep
        all texts of the rendering until the garbage collector runs.
        """
        if source is None:
            raise  # noqa: PLE0704 - Jinja calls this in an ``except`` clause
        super().handle_exception(source)

    def join_parts(self, parts: Iterable[Any]) -> str:
        """The operation of ``~``."""
        return joined(parts)

    def counted(self, value: Any) -> Any:
        """Return a value that the template nests or compares, if it has not too many items."""
        return counted(value)

    @property
    def goes_on(self) -> bool:
        """The condition put into loops: true, or raises after the time limit."""
        _check_time()
        return True

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _OPERATORS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps methods that format
        owner = getattr(method, "__self__", None)
        if owner is None:
            return super().call(__context, __obj, *args, **kwargs)
        if owner is __self:  # ``join_parts`` or ``counted``
            return __obj(*args)
        args = check_method(owner, method.__name__, args, kwargs)
        return made(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_refused = attr in _REFUSED_METHODS and isinstance(obj, str | int)
        return not is_refused and super().is_safe_attribute(obj, attr, value)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        return joined(parts)


class BoundedTemplate:
    """A template with limited renderings."""

    def __init__(self, template: Any) -> None:
        """``template``: made by a ``Sandbox``."""
        self._template = template

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text. Raises Jinja's errors, and ``RequestError`` at a limit."""
        budget = Budget(limits_here())
        token = BUDGET.set(budget)
        try:
            parts: list[str] = []
            num_chars = 0
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part)
                if num_chars > budget.max_chars:
                    budget.take(num_chars)
            return "".join(parts)
        finally:
            BUDGET.reset(token)


_GOES_ON = nodes.EnvironmentAttribute("goes_on")


class _Bounds(NodeTransformer):
    """Puts a check of the time into each loop, and measures what has no filter or operator."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as Jinja has it
        self.generic_visit(node)
        node.body.insert(0, self._set(nodes.ExprStmt(_GOES_ON), node))
        if node.test is not None:
            node.test = self._set(nodes.And(_GOES_ON, node.test), node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load")
        return self._call("join_parts", parts, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        sides: list[Any] = [node, *node.ops]
        # A constant is compared quickly with anything.
        if sum(not _is_constant(side.expr) for side in sides) > 1:
            for side in sides:
                side.expr = self._call("counted", side.expr, side)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._count(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._count(node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._count(node)

    def _count(self, node: nodes.Expr) -> nodes.Node:
        """Count what ``node`` makes, as lists of lists grow quickly."""
        is_constant = _is_constant(node)
        self.generic_visit(node)
        return node if is_constant else self._call("counted", node, node)

    def _call(self, name: str, argument: nodes.Expr, like: nodes.Node) -> nodes.Node:
        function = nodes.EnvironmentAttribute(name)
        return self._set(nodes.Call(function, [argument], [], None, None), like)

    def _set(self, made: _Node, like: nodes.Node) -> _Node:
        made.set_lineno(like.lineno)
        made.set_environment(self._environment)
        return made


def _is_constant(node: nodes.Node) -> bool:
    """Whether ``node`` is a constant, or a list of constants, which is short."""
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple | nodes.Dict)
        and all(isinstance(one, nodes.Const | nodes.Pair) for one in node.iter_child_nodes())
        and all(isinstance(one.value, nodes.Const) for one in node.find_all(nodes.Pair))
    )


def _check_time() -> None:
    budget = BUDGET.get(None)
    if budget is not None:
        budget.deadline.check()


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of Jinja that is measured."""
    first = int(hasattr(function, "jinja_pass_arg"))  # the value comes after Jinja's own arguments

    @functools.wraps(function)  # and marks for Jinja's own arguments
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[first:]
        value = check_filter(name, value, [*rest, *kwargs.values()])
        return made(function(*args[:first], value, *rest, **kwargs))

    return bounded


def _bounded_test(function: Any) -> Callable[..., Any]:
    """Return a test of Jinja that counts what it compares."""

    @functools.wraps(function)
    def bounded(*values: Any) -> Any:
        return function(*map(counted, values))

    return bounded


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
