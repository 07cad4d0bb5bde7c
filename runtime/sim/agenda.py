"""An event queue for simulations of many things on one clock. Pure."""

import itertools
import math
from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Agenda:
    """Actions by time; ties are broken by order, then by index, then by insertion."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, int]] = []
        self._actions: dict[int, Action] = {}  # by serial number; cancelled ones are removed
        self._serials = itertools.count()
        self._expected: dict[tuple[str, int], int] = {}  # serial numbers; may have been taken

    def add(self, at_s: float, order: int, index: int, action: Action) -> int:
        """Schedule ``action`` at ``at_s``; return its serial number."""
        serial = next(self._serials)
        heappush(self._heap, (at_s, order, index, serial))
        self._actions[serial] = action
        return serial

    def expect(self, kind: str, index: int, due: tuple[float, int], action: Action) -> None:
        """Replace the action of this kind and index; ``due``: its time and order.

        A time of inf cancels it.
        """
        self._actions.pop(self._expected.pop((kind, index), -1), None)
        if due[0] < math.inf:
            self._expected[kind, index] = self.add(*due, index, action)

    def take(self) -> tuple[float, int, Action] | None:
        """Return the earliest action, with its time and order; None if there is none."""
        while self._heap:
            at_s, order, _, serial = heappop(self._heap)
            action = self._actions.pop(serial, None)
            if action is not None:
                return at_s, order, action
        return None
