"""Where chat templates are rendered, and for how long.

The event loop begins each rendering. One that is not quick begins again in a thread. Its time is
that of the processor: a busy machine makes no template fail.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

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
