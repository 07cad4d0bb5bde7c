"""Health of an engine, by its heartbeats and its connections. Pure.

An engine is ejected when its heartbeat does not grow for 2 s: it is stopped, blocked or cut off.
One that refuses or closes its connection is ejected at once. Three heartbeats bring it back.
"""

SILENT_AFTER_S = 2.0
_HEARTBEATS_TO_RETURN = 3
_MAX_WAIT_S = 0.25  # counted per check; checks are 0.1 s apart if this process is not late

# Causes.
EXITED = "exited"  # it closed its stream
REFUSED = "refused"  # no process listens there
SILENT = "silent"


class EngineHealth:
    """Health of one engine, from when the gateway first connects to it."""

    def __init__(self) -> None:
        self.ejected_for: str | None = REFUSED  # until its first heartbeat
        self.silent_s = 0.0  # since its heartbeat grew, except while this process could not read it
        self._is_new = True
        self._last_heartbeat = -1
        self._num_heartbeats = 0  # since it was ejected

    def on_heartbeat(self, number: int) -> bool:
        """Apply a heartbeat of the engine; return whether it readmits the engine."""
        if number == self._last_heartbeat:
            return False
        self._last_heartbeat, self.silent_s = number, 0.0
        if self.ejected_for is None:
            return False
        self._num_heartbeats += 1
        if self._num_heartbeats < _HEARTBEATS_TO_RETURN and not self._is_new:
            return False
        self._is_new, self.ejected_for = False, None
        return True

    def eject(self, cause: str) -> bool:
        """Eject the engine until it recovers; return whether it was not ejected before."""
        was_in = self.ejected_for is None
        self._num_heartbeats = 0
        if was_in:
            self.ejected_for = cause
        return was_in

    def advance(self, duration_s: float) -> bool:
        """Count ``duration_s`` without a heartbeat; return whether the engine is to be ejected.

        The count is limited per check: a gateway that was late itself has messages yet to read.
        """
        self.silent_s += min(duration_s, _MAX_WAIT_S)
        return self.ejected_for is None and self.silent_s >= SILENT_AFTER_S
