"""A clock that advances only when its user sleeps."""


class VirtualClock:
    """Returns virtual seconds when called."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        """Advance by ``duration_s`` without waiting."""
        assert duration_s >= 0.0, duration_s
        self._now_s += duration_s

    def sleep_until(self, at_s: float) -> None:
        """Advance to at least ``at_s``, unless it is past; repeats where rounding falls short."""
        while self._now_s < at_s:
            self.sleep(at_s - self._now_s)
