"""The controller's side of the process that runs agents on other machines. One event loop.

A wish is a request to start one engine there; it is stored until that process has taken it.
"""

import asyncio
import time
import uuid
from collections.abc import Callable

import msgspec

from ..http.calls import UnreachableError
from ..wire import MachinesOrders, MachinesReport
from .registry import Registry

_SILENT_S = 3.0
_TAKE_TIMEOUT_S = 5.0


class Machines:
    """The last report of that process, and open wishes."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry  # stores wishes over restarts of the controller
        self._clock = clock
        self._report: MachinesReport | None = None
        self._reported_s = 0.0
        # Set when the wish is taken.
        self._wishes = {wish: asyncio.Event() for wish in registry.wishes()}

    def apply_report(self, report: MachinesReport, num_engines: int) -> MachinesOrders:
        """Apply a report; return the open wishes. ``num_engines``: the number of ready engines."""
        self._report, self._reported_s = report, self._clock()
        for wish in report.taken:
            if wish in self._wishes:
                self._registry.end_wish(wish)
                self._wishes.pop(wish).set()
        return MachinesOrders(wishes=tuple(self._wishes), num_engines=num_engines)

    def state(self) -> MachinesReport | None:
        """Return the last report, marked down if it is old; None without other machines."""
        report = self._report
        if report is None or self._clock() - self._reported_s < _SILENT_S:
            return report
        return msgspec.structs.replace(
            report, is_up=False, num_supervised=0, reason=report.reason or "it is silent", taken=()
        )

    async def start_engine(self) -> None:
        """Have an engine started on another machine.

        Raises ``UnreachableError`` if the start must wait; the wish is stored and granted later.
        Raises ``ResourceError`` if the wish cannot be stored.
        """
        wish, taken = uuid.uuid4().hex, asyncio.Event()
        self._registry.add_wish(wish)
        self._wishes[wish] = taken
        try:
            async with asyncio.timeout(_TAKE_TIMEOUT_S):
                await taken.wait()
        except TimeoutError:
            pass
        state = self.state()
        assert state is not None
        if not state.is_up or not taken.is_set():
            raise UnreachableError(
                f"no engine can be started by {state.kind} now ({state.reason or 'it is busy'}); "
                "the start is stored, and done when that is possible"
            )
