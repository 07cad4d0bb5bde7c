"""A mean that follows its values. Pure."""

_MEAN_OF = 1000  # newest values that a mean goes by, about


class RunningMean:
    """Of all values at first, then with little weight on old ones; 0 before the first."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num_values = 0

    def add(self, value: float) -> None:
        """Count a value in."""
        self._num_values = min(self._num_values + 1, _MEAN_OF)
        self.value += (value - self.value) / self._num_values
