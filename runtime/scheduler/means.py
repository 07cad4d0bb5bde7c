"""A running mean. Pure."""

_MEAN_OF = 1000  # the newest values, approximately


class RunningMean:
    """Mean of the first 1000 values, then exponentially weighted. 0 before the first value."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num_values = 0

    def add(self, value: float) -> None:
        """Include a value."""
        self._num_values = min(self._num_values + 1, _MEAN_OF)
        self.value += (value - self.value) / self._num_values
