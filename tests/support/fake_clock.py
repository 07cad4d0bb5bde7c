"""A clock that advances only by sleeping."""


class FakeClock:
    """Shows seconds; ``sleep`` advances it, by ``overshoot_s`` too much."""

    def __init__(self, now_s: float = 0.0, *, overshoot_s: float = 0.0) -> None:
        self.now_s = now_s
        self.overshoot_s = overshoot_s
        self.sleeps_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        """What ``time.sleep`` does, but at once."""
        self.sleeps_s.append(duration_s)
        self.now_s += duration_s + self.overshoot_s
