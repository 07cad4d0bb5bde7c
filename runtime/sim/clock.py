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
