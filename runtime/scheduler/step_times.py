"""How long steps take, for policies: from the machine's profile, or learned from steps. Pure."""

from typing import Protocol

from ...profiles.curve import Curve
from ...profiles.models import MachineModel
from ...profiles.step_time import forward_s

_SMOOTHING = 0.1  # weight of the newest step of a size


class StepTimes(Protocol):
    """Seconds of one request's steps while nothing else runs."""

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        """All steps that compute so many tokens of a prompt; 0 while nothing is known."""
        ...

    def decode_step_s(self, num_rows: int) -> float:
        """One step of so many rows that decode; 0 while nothing is known."""
        ...

    def step_ended(self, num_tokens: int, duration_s: float) -> None:
        """A step of so many tokens took so long."""
        ...


class ProfiledTimes:
    """What a profile predicts."""

    def __init__(self, model: MachineModel, max_step_tokens: int) -> None:
        self._model = model
        self._max_step_tokens = max_step_tokens

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        starts = range(0, num_tokens, self._max_step_tokens)
        chunk_tokens = self._max_step_tokens
        return sum(
            forward_s(
                self._model, (min(chunk_tokens, num_tokens - start),), (start,), (adapter_bytes,)
            )
            for start in starts
        )

    def decode_step_s(self, num_rows: int) -> float:
        return forward_s(self._model, (1,) * num_rows, (0,) * num_rows, (0,) * num_rows)

    def step_ended(self, num_tokens: int, duration_s: float) -> None:
        """The profile has been measured without haste."""


class LearnedTimes:
    """What steps of like size have taken, for machines without a profile."""

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        # By the octave of their tokens: mean tokens and mean seconds, both fading.
        self._means: dict[int, tuple[float, float]] = {}
        self._curve: Curve | None = None  # through them; None = to be made

    def prefill_s(self, num_tokens: int, adapter_bytes: int) -> float:
        num_whole, num_left = divmod(num_tokens, self._max_step_tokens)
        whole_s = num_whole * self._at(self._max_step_tokens) if num_whole else 0.0
        return whole_s + (self._at(num_left) if num_left else 0.0)

    def decode_step_s(self, num_rows: int) -> float:
        return self._at(num_rows)

    def step_ended(self, num_tokens: int, duration_s: float) -> None:
        octave = num_tokens.bit_length()
        tokens, seconds = self._means.get(octave, (num_tokens, duration_s))
        self._means[octave] = (
            tokens + _SMOOTHING * (num_tokens - tokens),
            seconds + _SMOOTHING * (duration_s - seconds),
        )
        self._curve = None

    def _at(self, num_tokens: int) -> float:
        if not self._means:
            return 0.0
        if self._curve is None:
            self._curve = Curve.rising(dict(self._means.values()))
        return self._curve.at(num_tokens)
