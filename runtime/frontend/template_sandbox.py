"""The sandbox of chat templates: Jinja's, with limits on time and on text.

Templates come with models and adapters, their input with requests. Each iteration of a loop, each
call and each filter checks the time. What they make is measured (``template_limits``).
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
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
