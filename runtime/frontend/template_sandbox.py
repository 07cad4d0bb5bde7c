"""The sandbox of chat templates: Jinja's, with limits on time and on text.

Templates come with models and adapters, their input with requests. Each iteration of a loop and
each call checks the time. Operations that can make large results of small inputs (products,
paddings, joined texts) are measured before they run.
"""

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..errors import RequestError
from ..limits import TemplateLimits

_INLINE_S = 0.005  # on the event loop; then the rendering is repeated in a thread
_MAX_POWER_BITS = 4096  # of a number
_MADE_FACTOR = 16  # limit of all intermediate texts together, relative to the longest text
_WIDE = re.compile(r"\d{6}|\*")  # a padding of a format
_PADDINGS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_MANY_LINES = 10_000
_SIZED = (str, bytes, list, tuple)


class TemplateTimeoutError(RequestError):
    """A template took too long."""

    code = "template_timeout"


class TemplateTooLongError(RequestError):
    """A template made too much text."""

    code = "template_too_long"


class _Budget:
    """The remaining time and characters of one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.max_chars = limits.max_chars
        self._timeout_s = limits.timeout_s
        self._deadline_s = time.monotonic() + limits.timeout_s
        self._num_left = limits.max_chars * _MADE_FACTOR

    def check_time(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise TemplateTimeoutError(
                f"the chat template took more than {self._timeout_s:g} s (--template-timeout-s)",
                param="messages",
            )

    def take(self, num_chars: int) -> None:
        self._num_left -= num_chars
        if num_chars > self.max_chars or self._num_left < 0:
            raise TemplateTooLongError(
                f"the chat template makes more than {self.max_chars} characters "
                "(--max-template-chars)",
                param="messages",
            )


_Node = TypeVar("_Node", bound=nodes.Node)

_limits: ContextVar[TemplateLimits] = ContextVar("_limits")
_budget: ContextVar[_Budget] = ContextVar("_budget")


@contextlib.contextmanager
def template_limits(limits: TemplateLimits) -> Iterator[None]:
    """Limit each rendering in this context by ``limits``; outside, defaults apply."""
    token = _limits.set(limits)
    try:
        yield
    finally:
        _limits.reset(token)


async def render_in_time(render: Callable[[], str], limits: TemplateLimits) -> str:
    """Return the result of ``render`` without blocking the event loop. Raises ``RequestError``."""
    inline = TemplateLimits(timeout_s=min(_INLINE_S, limits.timeout_s), max_chars=limits.max_chars)
    with contextlib.suppress(TemplateTimeoutError), template_limits(inline):
        return render()

    def again() -> str:
        with template_limits(limits):
            return render()

    return await asyncio.to_thread(again)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.filters = {
            name: bounded_filter(name, filter_) for name, filter_ in self.filters.items()
        }

    def template_of(self, source: str) -> "BoundedTemplate":
        """Compile ``source``. Raises ``TemplateError``."""
        tree = _Bounds(self).visit(self.parse(source))
        return BoundedTemplate(self.from_string(tree))

    def join_parts(self, parts: Iterable[Any]) -> str:
        """The operation of ``~``."""
        return _joined(parts)

    @property
    def goes_on(self) -> bool:
        """The condition put into loops: true, or raises after the time limit."""
        _check_time()
        return True

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _take(len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps methods that format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = _check_method(owner, method.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        return _joined(parts)


class BoundedTemplate:
    """A template with limited renderings."""

    def __init__(self, template: Any) -> None:
        """``template``: made by a ``Sandbox``."""
        self._template = template

    def render(self, variables: dict[str, Any]) -> str:
        """Return the text. Raises Jinja's errors, and ``RequestError`` at a limit."""
        budget = _Budget(_limits.get(TemplateLimits()))
        token = _budget.set(budget)
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
            _budget.reset(token)


_GOES_ON = nodes.EnvironmentAttribute("goes_on")


class _Bounds(NodeTransformer):
    """Puts a check of the time into each loop, and limits the results of ``~``."""

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
        join = nodes.EnvironmentAttribute("join_parts")
        return self._set(nodes.Call(join, [parts], [], None, None), node)

    def _set(self, made: _Node, like: nodes.Node) -> _Node:
        made.set_lineno(like.lineno)
        made.set_environment(self._environment)
        return made


def _check_time() -> None:
    budget = _budget.get(None)
    if budget is not None:
        budget.check_time()


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of Jinja that is measured before it is applied."""
    check = _FILTER_CHECKS.get(name)
    if check is None:
        return function
    first = int(hasattr(function, "jinja_pass_arg"))  # the value comes after Jinja's own arguments

    @functools.wraps(function)  # and marks for Jinja's own arguments
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[first:]
        return function(*args[:first], check(value, [*rest, *kwargs.values()]), *rest, **kwargs)

    return bounded


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Measure the result of a method of ``text``; return the arguments to call it with."""
    given = [*args, *kwargs.values()]
    if name in _PADDINGS:
        _check_padding(text, given)
    elif name == "format":
        _check_format(text, given)
    elif name == "format_map" and isinstance(args[0], Mapping):
        _check_format(text, args[0].values())
    elif name == "replace" and len(args) >= 2:
        _check_replace(text, given)
    elif name == "join" and len(args) == 1:
        return (_check_join(args[0], [text]),)
    return args


def _check_padding(value: Any, given: list[Any]) -> Any:
    """Each line or tab of ``value`` may become as wide as a number in ``given``, or as a text."""
    num_lines = value.count("\n") + value.count("\t") + 1 if isinstance(value, str) else 1
    for width in given:
        if isinstance(width, int):
            _take(num_lines * abs(width))
        elif isinstance(width, str):
            _take(num_lines * len(width))
    return value


def _check_indent(value: Any, given: list[Any]) -> Any:
    """``value`` may become any number of lines, each indented by a number in ``given``."""
    for width in given:
        if isinstance(width, int):
            _take(_MANY_LINES * abs(width))
    return value


def _check_format(value: Any, given: Iterable[Any] = ()) -> Any:
    """The paddings of the format ``value`` may come from ``given``."""
    if isinstance(value, str) and _WIDE.search(value):
        raise TemplateTooLongError("the chat template uses a padding that is too wide")
    _check_padding("", [one for one in given if isinstance(one, int)])
    return value


def _check_replace(value: Any, given: list[Any]) -> Any:
    text, old, new = str(value), str(given[0]), str(given[1])
    _take(len(text) + text.count(old) * len(new))
    return value


def _check_join(value: Any, given: list[Any]) -> Any:
    parts = list(value)
    separator = given[0] if given and isinstance(given[0], str) else ""
    _take(sum(len(one) for one in parts if isinstance(one, str)) + len(parts) * len(separator))
    return parts


_FILTER_CHECKS: dict[str, Callable[[Any, list[Any]], Any]] = {
    **dict.fromkeys(("center", "indent", "batch", "slice"), _check_padding),
    "tojson": _check_indent,
    "format": _check_format,
    "replace": _check_replace,
    "join": _check_join,
}


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, _SIZED) and isinstance(other, int):
            _take(len(one) * max(0, other))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_POWER_BITS:
        raise TemplateTooLongError("the chat template makes a number that is too large")


def _joined(parts: Iterable[Any]) -> str:
    texts = list(map(str, parts))
    _take(sum(map(len, texts)))
    return "".join(texts)


def _take(num_chars: int) -> None:
    budget = _budget.get(None)
    if budget is None:  # a constant, while a template is compiled
        budget = _Budget(TemplateLimits())
    budget.take(num_chars)
