"""The sandbox of chat templates: Jinja's, with limits on time and on text.

Templates come with models and adapters, their input with requests. Each iteration of a loop, each
call and each filter checks the time. Operations that can make large results of small inputs
(products, nested lists, paddings, joined texts) are measured before they run. Nothing can end a
filter, so that filters which take long are given short inputs only.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..errors import RequestError
from ..limits import TemplateLimits
from .template_time import Deadline, leave_to_thread, limits_here

_MAX_POWER_BITS = 4096  # of a number
_MADE_FACTOR = 16  # limit of all intermediate texts together, relative to the longest text
_WIDE = re.compile(r"\d{6}|\*")  # a padding of a format
_PADDINGS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_MANY_LINES = 10_000
_CONTAINERS = (list, tuple, dict)
_SIZED = (str, bytes, list, tuple)
_ITEM_CHARS = 8  # an item of a list counts as so many characters
# Filters that take a few nanoseconds for each character.
_QUICK_FILTERS = frozenset(
    {
        *("abs", "attr", "capitalize", "center", "count", "d", "default", "e", "escape", "first"),
        *("float", "forceescape", "format", "int", "join", "last", "length", "lower", "replace"),
        *("round", "safe", "string", "tojson", "trim", "upper"),
    }
)
_SLOW_FACTOR = 16  # others take this share of the longest text, in characters or items
_QUICK_ON_LOOP = 65_536  # characters or items that a filter takes on the event loop
_SLOW_ON_LOOP = 1024


class TemplateTooLongError(RequestError):
    """A template made too much text."""

    code = "template_too_long"


class _Budget:
    """The remaining time and characters of one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.max_chars = limits.max_chars
        self.deadline = Deadline(limits)
        self._num_left = limits.max_chars * _MADE_FACTOR

    def take(self, num_chars: int) -> None:
        self._num_left -= num_chars
        if num_chars > self.max_chars or self._num_left < 0:
            raise TemplateTooLongError(
                f"the chat template makes more than {self.max_chars} characters "
                "(--max-template-chars)",
                param="messages",
            )

    def check_filter(self, name: str, value: object) -> None:
        """Raise unless the filter is quick with ``value``."""
        self.deadline.check()
        size = len(value) if isinstance(value, (*_SIZED, dict)) else 0
        is_quick = name in _QUICK_FILTERS
        if self.deadline.is_on_loop and size > (_QUICK_ON_LOOP if is_quick else _SLOW_ON_LOOP):
            leave_to_thread()
        if not is_quick and size * _SLOW_FACTOR > self.max_chars:
            raise TemplateTooLongError(
                f"the chat template gives the filter {name!r} {size} characters or items, at most "
                f"{self.max_chars // _SLOW_FACTOR} are allowed (1/{_SLOW_FACTOR} of "
                "--max-template-chars)",
                param="messages",
            )


_Node = TypeVar("_Node", bound=nodes.Node)

_budget: ContextVar[_Budget] = ContextVar("_budget")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.filters = {
            name: bounded_filter(name, filter_) for name, filter_ in self.filters.items()
        }
        self.finalize = _measured

    def template_of(self, source: str) -> "BoundedTemplate":
        """Compile ``source``. Raises ``TemplateError``."""
        tree = _Bounds(self).visit(self.parse(source))
        return BoundedTemplate(self.from_string(tree))

    def join_parts(self, parts: Iterable[Any]) -> str:
        """The operation of ``~``."""
        return _joined(parts)

    def measured(self, value: Any) -> Any:
        """Return a list, tuple or dictionary that the template writes, if it is not too large."""
        return _measured(value)

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
        budget = _Budget(limits_here())
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
        return self._call("join_parts", parts, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._measure(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._measure(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._measure(node, [pair.value for pair in node.items])

    def _measure(self, node: nodes.Expr, items: Iterable[nodes.Expr]) -> nodes.Node:
        """Measure what ``node`` makes, as lists of lists grow quickly; constants are short."""
        is_constant = all(isinstance(item, nodes.Const) for item in items)
        self.generic_visit(node)
        return node if is_constant else self._call("measured", node, node)

    def _call(self, name: str, argument: nodes.Expr, like: nodes.Node) -> nodes.Node:
        function = nodes.EnvironmentAttribute(name)
        return self._set(nodes.Call(function, [argument], [], None, None), like)

    def _set(self, made: _Node, like: nodes.Node) -> _Node:
        made.set_lineno(like.lineno)
        made.set_environment(self._environment)
        return made


def _check_time() -> None:
    budget = _budget.get(None)
    if budget is not None:
        budget.deadline.check()


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of Jinja that is measured before it is applied."""
    check = _FILTER_CHECKS.get(name)
    first = int(hasattr(function, "jinja_pass_arg"))  # the value comes after Jinja's own arguments

    @functools.wraps(function)  # and marks for Jinja's own arguments
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[first:]
        _budget_here().check_filter(name, value)
        if check is not None:
            value = check(value, [*rest, *kwargs.values()])
        return function(*args[:first], value, *rest, **kwargs)

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


def _measured(value: Any, given: Iterable[Any] = ()) -> Any:
    """Return ``value``, which becomes text, if it has not too many items, also nested ones."""
    if isinstance(value, _CONTAINERS):
        _take(_num_nested(value) * _ITEM_CHARS)
    return value


def _num_nested(value: Any) -> int:
    """Return the items in lists, tuples and dictionaries of ``value``, at least if they are few."""
    num_items, left, most = 0, [value], _budget_here().max_chars
    while left and num_items <= most:
        one = left.pop()
        num_items += len(one)
        items = one.values() if isinstance(one, dict) else one
        left += [item for item in items if isinstance(item, _CONTAINERS)]
    return num_items


def _check_sum(value: Any, given: list[Any]) -> Any:
    """A sum of lists copies them again for each."""
    if any(isinstance(one, bytes | list | tuple) for one in given):
        raise TemplateTooLongError("the chat template adds other things than numbers with 'sum'")
    return value


def _check_indent(value: Any, given: list[Any]) -> Any:
    """``value`` may become any number of lines, each indented by a number in ``given``."""
    _measured(value)
    for width in given:
        if isinstance(width, int):
            _take(_MANY_LINES * abs(width))
    return value


def _check_format(value: Any, given: Iterable[Any] = ()) -> Any:
    """The paddings of the format ``value`` may come from ``given``."""
    if isinstance(value, str) and _WIDE.search(value):
        raise TemplateTooLongError("the chat template uses a padding that is too wide")
    given = [_measured(one) for one in given]
    _check_padding("", [one for one in given if isinstance(one, int)])
    return value


def _check_replace(value: Any, given: list[Any]) -> Any:
    text, old, new = str(_measured(value)), str(given[0]), str(given[1])
    _take(len(text) + text.count(old) * len(new))
    return value


def _check_join(value: Any, given: list[Any]) -> Any:
    parts = [_measured(one) for one in value]
    separator = given[0] if given and isinstance(given[0], str) else ""
    _take(sum(len(one) for one in parts if isinstance(one, str)) + len(parts) * len(separator))
    return parts


_FILTER_CHECKS: dict[str, Callable[[Any, list[Any]], Any]] = {
    **dict.fromkeys(("center", "indent", "batch", "slice"), _check_padding),
    "tojson": _check_indent,
    "format": _check_format,
    "replace": _check_replace,
    "join": _check_join,
    "sum": _check_sum,
    **dict.fromkeys(("string", "pprint", "xmlattr", "urlencode"), _measured),
}


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, _SIZED) and isinstance(other, int):
            size = len(one) if isinstance(one, str | bytes) else _num_nested(one) * _ITEM_CHARS
            _take(size * max(0, other))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_POWER_BITS:
        raise TemplateTooLongError("the chat template makes a number that is too large")


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(_measured(part)) for part in parts]
    _take(sum(map(len, texts)))
    return "".join(texts)


def _take(num_chars: int) -> None:
    _budget_here().take(num_chars)


def _budget_here() -> _Budget:
    """The budget of the rendering; a new one for a constant, while a template is compiled."""
    return _budget.get(None) or _Budget(TemplateLimits())
