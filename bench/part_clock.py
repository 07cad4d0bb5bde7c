"""Clocks around functions and modules of a running program: which of them takes the time?"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# A name, an object, and its attribute that is called.
Part = tuple[str, Any, str]


class PartClock:
    """Seconds of each part's own: what it calls and has a clock too is not in it.

    One thread calls the parts.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.own_s: dict[str, float] = defaultdict(float)
        self._inner_s = [0.0]  # of what the parts that are running have called

    @contextmanager
    def around(self, parts: Iterable[Part]) -> Iterator[None]:
        """Put clocks around ``parts``, and take them off again."""
        undo: list[Callable[[], None]] = []
        try:
            for part, owner, name in parts:
                function = owner[name] if isinstance(owner, dict) else getattr(owner, name)
                undo.append(_replace(owner, name, self._timed(part, function)))
            yield
        finally:
            for back in reversed(undo):
                back()

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner_s.append(0.0)
            start = self._clock()
            try:
                return function(*arguments, **named)
            finally:
                taken = self._clock() - start
                self.own_s[part] += taken - self._inner_s.pop()
                self._inner_s[-1] += taken

        return timed


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute or an entry of a table; returns what undoes it."""
    if isinstance(owner, dict):
        old = owner[name]
        owner[name] = value
        return lambda: owner.__setitem__(name, old)
    was_own = name in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, value)
    return (lambda: setattr(owner, name, old)) if was_own else (lambda: delattr(owner, name))
