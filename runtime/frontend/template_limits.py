"""Limits of a chat template: where and for how long it is rendered, and the sizes of what it makes.

The event loop begins each rendering. One that is not quick begins again in a thread. Its time is
that of the processor: a busy machine makes no template fail.

Most sizes are measured before a text is made. No text gets longer than ``max_chars``, except by a
small factor where characters are escaped, which ends the rendering. A list or dictionary can be
nested in others many times. So it is counted with all that is nested in it before it becomes text
or is compared.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from itertools import chain
from typing import Any

from ..errors import RequestError
from ..limits import TemplateLimits

_ON_LOOP_S = 0.005  # then the rendering is repeated in a thread
_LATE_S = 10.0  # of any time, after its limit; then a thread is not waited for any more
_NUM_THREADS = 2

_limits: ContextVar[TemplateLimits] = ContextVar("_limits")
_is_on_loop: ContextVar[bool] = ContextVar("_is_on_loop", default=False)
_pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chat-templates")


class TemplateTimeoutError(RequestError):
    """A template took too long."""

    code = "template_timeout"


class _NotQuickError(Exception):
    """The event loop does not render this."""


class Deadline:
    """The processor time that one rendering has, in one thread."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.is_on_loop = _is_on_loop.get()
        self._timeout_s = limits.timeout_s
        left_s = min(_ON_LOOP_S, limits.timeout_s) if self.is_on_loop else limits.timeout_s
        self._end_cpu_s = time.thread_time() + left_s
        self._next_look_s = time.monotonic() + left_s  # this clock is read faster

    def check(self) -> None:
        """Raise after the deadline."""
        now_s = time.monotonic()
        if now_s <= self._next_look_s:
            return
        left_s = self._end_cpu_s - time.thread_time()
        if left_s <= 0:
            leave_to_thread()
            raise _timeout_error(self._timeout_s)
        self._next_look_s = now_s + left_s


def leave_to_thread() -> None:
    """End a rendering on the event loop; it begins again in a thread, where this returns."""
    if _is_on_loop.get():
        raise _NotQuickError


@contextlib.contextmanager
def template_limits(limits: TemplateLimits) -> Iterator[None]:
    """Limit each rendering in this context by ``limits``; outside, defaults apply."""
    token = _limits.set(limits)
    try:
        yield
    finally:
        _limits.reset(token)


def limits_here() -> TemplateLimits:
    """Return the limits of this context."""
    return _limits.get(TemplateLimits())


async def render_in_time(render: Callable[[], str], limits: TemplateLimits, *, is_large: bool = False) -> str:
    """Return the result of ``render`` without blocking the event loop. Raises ``RequestError``.

    ``is_large``: its input is too large for the event loop.
    """
    with template_limits(limits):
        if not is_large:
            with contextlib.suppress(_NotQuickError):
                return _on_loop(render)
    began_s: list[float] = []

    def beside() -> str:
        began_s.append(time.monotonic())
        with template_limits(limits):
            return render()

    rendering = asyncio.get_running_loop().run_in_executor(_pool, beside)
    longest_s = limits.timeout_s + _LATE_S
    try:
        while not rendering.done():
            await asyncio.wait({rendering}, timeout=longest_s)
            is_late = began_s and time.monotonic() > began_s[0] + longest_s
            if is_late and not rendering.done():
                raise _timeout_error(limits.timeout_s)
        return rendering.result()
    finally:
        rendering.cancel()  # a thread that renders ends at its next check
        del rendering  # an error's traceback has this frame: a cycle would keep the texts


def _on_loop(render: Callable[[], str]) -> str:
    token = _is_on_loop.set(True)
    try:
        return render()
    finally:
        _is_on_loop.reset(token)


def _timeout_error(timeout_s: float) -> TemplateTimeoutError:
    return TemplateTimeoutError(
        f"the chat template took more than {timeout_s:g} s (--template-timeout-s)", param="messages"
    )


_MAX_POWER_BITS = 4096  # of a number
_MADE_FACTOR = 16  # limit of all intermediate texts together, relative to the longest text
_WIDE = re.compile(r"\d{6}|\*")  # a padding of a format
_PADDINGS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_TAB_CHARS = 8
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (list, tuple, dict, *_VIEWS)
_SIZED = (str, list, tuple)
_ITEM_CHARS = 8  # an item of a list counts as so many characters
# Filters that take a few nanoseconds for each character.
_QUICK_FILTERS = frozenset(
    {
        *("abs", "attr", "capitalize", "center", "count", "d", "default", "e", "escape", "first"),
        *("float", "forceescape", "format", "int", "join", "last", "length", "lower", "replace"),
        *("round", "safe", "string", "tojson", "trim", "upper"),
    }
)
# Filters that make no text of a list or dictionary.
_FILTERS_OF_ITEMS = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items"),
        *("join", "last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr"),
        *("reverse", "select", "selectattr", "slice", "sort", "sum", "unique"),
    }
)
_COMPARING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
# Filters that do not write a text which they are given for each item or character.
_SINGLE_USE = frozenset(
    {
        *("attr", "batch", "center", "d", "default", "dictsort", "format", "groupby", "indent"),
        *("join", "map", "max", "min", "reject", "rejectattr", "replace", "select", "selectattr"),
        *("slice", "sort", "sum", "tojson", "trim", "truncate", "unique"),
    }
)
_SLOW_FACTOR = 16  # others take this share of the longest text, in characters or items
_QUICK_ON_LOOP = 65_536  # characters or items that the event loop takes at a time
_SLOW_ON_LOOP = 1024  # for a filter that is not quick


class TemplateTooLongError(RequestError):
    """A template makes too much text."""

    code = "template_too_long"


class Budget:
    """What one rendering may use."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.max_chars = limits.max_chars
        self.deadline = Deadline(limits)
        self._num_left = limits.max_chars * _MADE_FACTOR

    def take(self, num_chars: int) -> None:
        """Raise if a text of ``num_chars`` is too long, or all texts so far are."""
        self._num_left -= num_chars
        if num_chars > self.max_chars or self._num_left < 0:
            raise TemplateTooLongError(
                f"the chat template makes more than {self.max_chars} characters (--max-template-chars)",
                param="messages",
            )
        self.leave_if_large(num_chars)

    def leave_if_large(self, size: int) -> None:
        """Leave work on so many characters or items to a thread."""
        if self.deadline.is_on_loop and size > _QUICK_ON_LOOP:
            leave_to_thread()

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


BUDGET: ContextVar[Budget] = ContextVar("BUDGET")  # of the rendering


def budget_here() -> Budget:
    """The budget of the rendering.

    Raises ``LookupError`` while a template is compiled. Jinja then leaves an operation on constants
    to the rendering. The compiled template would keep its result otherwise.
    """
    return BUDGET.get()


def as_text(value: Any) -> Any:
    """Return ``value``, which becomes text, if that is not too long."""
    if isinstance(value, _CONTAINERS):
        budget_here().take(_size(value, counts_chars=True))
    return value


def counted(value: Any) -> Any:
    """Return ``value``, which is compared or nested, if it has not too many items."""
    if isinstance(value, _CONTAINERS):
        budget = budget_here()
        budget.deadline.check()
        if _size(value, counts_chars=False) > budget.max_chars:
            raise TemplateTooLongError(
                f"the chat template makes a list or dictionary of more than "
                f"{budget.max_chars // _ITEM_CHARS} items, with those nested in it (1/"
                f"{_ITEM_CHARS} of --max-template-chars)",
                param="messages",
            )
    return value


def made(value: Any) -> Any:
    """Return what a method or filter has made, if it is not too large."""
    if isinstance(value, str):
        budget_here().take(len(value))
    elif isinstance(value, list):
        budget_here().take(len(value) * _ITEM_CHARS)
    return value


def _size(value: Any, *, counts_chars: bool) -> int:
    """Return the characters that ``value`` counts as, at least if they are not too many.

    ``counts_chars``: with the texts in it.
    """
    budget = budget_here()
    kinds = (str, *_CONTAINERS) if counts_chars else _CONTAINERS
    num_chars, left = 0, [value]
    while left and num_chars <= budget.max_chars:
        one = left.pop()
        if isinstance(one, str):
            num_chars += len(one)
            continue
        budget.deadline.check()
        num_chars += len(one) * _ITEM_CHARS
        left += [item for item in _items(one) if isinstance(item, kinds)]
    return num_chars


def check_sum(left: Any, right: Any) -> None:
    """Measure ``left + right``."""
    if isinstance(left, _SIZED) and isinstance(right, _SIZED):
        budget_here().take(len(left) + len(right))
        if isinstance(left, tuple):  # which may be hashed, with all that is nested in it
            counted((left, right))


def check_product(left: Any, right: Any) -> None:
    """Measure ``left * right``."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, _SIZED) and isinstance(other, int):
            size = len(one) if isinstance(one, str) else _size(one, counts_chars=False)
            budget_here().take(size * max(0, other))
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def check_power(left: Any, right: Any) -> None:
    """Measure ``left ** right``."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_POWER_BITS:
        raise TemplateTooLongError("the chat template makes a number that is too large")


def check_remainder(left: Any, right: Any) -> None:
    """Measure ``left % right``, which formats if ``left`` is text."""
    if isinstance(left, str):
        given = right.values() if isinstance(right, Mapping) else right
        _check_format(left, given if isinstance(right, Mapping | tuple) else [given], mark="%")


def joined(parts: Iterable[Any]) -> str:
    """Return ``parts`` as one text."""
    texts = [str(as_text(part)) for part in parts]
    budget_here().take(sum(map(len, texts)))
    return "".join(texts)


def check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Measure a method's work on ``owner``; return the arguments to call it with."""
    if isinstance(owner, str):
        budget_here().leave_if_large(len(owner))
        return _check_text_method(owner, name, args, kwargs)
    if isinstance(owner, _CONTAINERS) and name in ("count", "index"):
        counted((owner, *args))
    return args


def _check_text_method(
    text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    given = [*args, *kwargs.values()]
    if name in _PADDINGS:
        _check_padding(text, given or [_TAB_CHARS])
    elif name == "format":
        _check_format(text, given, mark="{")
    elif name == "format_map" and isinstance(args[0], Mapping):
        _check_format(text, args[0].values(), mark="{")
    elif name == "replace" and len(args) >= 2:
        _check_replace(text, given)
    elif name == "join" and len(args) == 1:
        return (_check_join(args[0], [text]),)
    return args


def check_filter(name: str, value: Any, given: list[Any]) -> Any:
    """Measure a filter's work on ``value`` with the arguments ``given``; return the value to use.

    Nothing can end a filter. So those that take long for each character get short inputs only.
    """
    budget = budget_here()
    budget.check_filter(name, value)
    if name in _COMPARING_FILTERS:
        counted(value)
    elif name not in _FILTERS_OF_ITEMS:
        as_text(value)
    if name not in _SINGLE_USE and isinstance(value, (*_SIZED, dict)):
        num_given = sum(len(one) for one in given if isinstance(one, str))
        budget.take(len(value) * num_given)
    check = _FILTER_CHECKS.get(name)
    return value if check is None else check(value, given)


def _check_padding(value: Any, given: list[Any]) -> Any:
    """Each line or tab of ``value`` may become as wide as a number in ``given``, or as a text."""
    num_lines = value.count("\n") + value.count("\t") + 1 if isinstance(value, str) else 1
    for width in given:
        if isinstance(width, int):
            budget_here().take(num_lines * abs(width))
        elif isinstance(width, str):
            budget_here().take(num_lines * len(width))
    return value


def _check_format(value: Any, given: Iterable[Any], *, mark: str) -> None:
    """Each field of the format ``value``, which begins with ``mark``, may be any of ``given``."""
    if isinstance(value, str) and _WIDE.search(value):
        raise TemplateTooLongError("the chat template uses a padding that is too wide")
    longest = 0
    for one in given:
        if isinstance(one, (str, *_CONTAINERS)):
            longest = max(longest, _size(one, counts_chars=True))
        elif isinstance(one, int):
            _check_padding("", [one])
    budget_here().take(str(value).count(mark) * longest)


def _check_format_filter(value: Any, given: list[Any]) -> Any:
    _check_format(value, given, mark="%")
    return value


def _check_replace(value: Any, given: list[Any]) -> Any:
    text, old, new = (str(as_text(one)) for one in (value, *given[:2]))
    budget_here().take(len(text) + text.count(old) * len(new))
    return value


def _check_join(value: Any, given: list[Any]) -> Any:
    parts = [as_text(one) for one in value]
    separator = given[0] if given and isinstance(given[0], str) else ""
    num_chars = sum(len(one) for one in parts if isinstance(one, str))
    budget_here().take(num_chars + len(parts) * len(separator))
    return parts


def _check_total(value: Any, given: list[Any]) -> Any:
    """A sum of lists copies them again for each."""
    if any(isinstance(one, list | tuple) for one in given):
        raise TemplateTooLongError("the chat template adds other things than numbers with 'sum'")
    return value


def _check_json(value: Any, given: list[Any]) -> Any:
    """Each item of ``value`` is indented as often as it is nested, and has separators."""
    counted(value)
    num_items = _size(value, counts_chars=False) // _ITEM_CHARS if _is_nested(value) else 1
    for one in given:
        if isinstance(one, int | str) and not isinstance(one, bool):
            width = len(one) if isinstance(one, str) else abs(one)
            budget_here().take(num_items * _depth(value) * width)
        elif isinstance(one, list | tuple):
            budget_here().take(num_items * _size(one, counts_chars=True))
    return value


def _depth(value: Any) -> int:
    """Return the number of levels of ``value``, which does not have too many items."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [item for one in level if _is_nested(one) for item in _items(one)]
    return depth


def _is_nested(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def _items(value: Any) -> Iterable[Any]:
    return chain(value, value.values()) if isinstance(value, dict) else value


_FILTER_CHECKS: dict[str, Callable[[Any, list[Any]], Any]] = {
    **dict.fromkeys(("center", "indent", "batch", "slice"), _check_padding),
    "tojson": _check_json,
    "format": _check_format_filter,
    "replace": _check_replace,
    "join": _check_join,
    "sum": _check_total,
}
