"""Awaitables that are begun outside of any task: most have nothing to wait for."""

import types
from collections.abc import Awaitable, Generator
from typing import Any


def begin(awaitable: Awaitable[None]) -> Awaitable[None] | None:
    """Run ``awaitable`` until it first waits; return what is left of it, None if it has ended.

    What is left must be awaited in a task of the running event loop. Raises what ``awaitable``
    raises.
    """
    steps = awaitable.__await__()
    try:
        waited_for = next(steps)
    except StopIteration:
        return None
    return _continue(steps, waited_for)


@types.coroutine
def _continue(steps: Generator[Any, Any, None], waited_for: Any) -> Generator[Any, Any, None]:
    try:
        yield waited_for  # now it is this task that waits for it
    except BaseException:
        steps.close()
        raise
    yield from steps
