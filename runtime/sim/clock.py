"""Time that passes only when somebody waits."""


class VirtualClock:
    """Shows seconds; waiting costs none of anybody's."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        """What ``time.sleep`` does, but at once."""
        assert duration_s >= 0.0, duration_s
        self._now_s += duration_s

    def sleep_until(self, at_s: float) -> None:
        """Pass to ``at_s``, unless it is past; as often as rounding wants it."""
        while self._now_s < at_s:
            self.sleep(at_s - self._now_s)
