"""How long steps take, for policies: from the machine's profile, or learned from steps. Pure."""

from typing import Protocol

from ...profiles.curve import Curve
from ...profiles.models import LinkModel, LoraModel, MachineModel
from ...profiles.step_time import forward_s

_SMOOTHING = 0.1  # weight of the newest step of a size
_NO_LINK_BYTES_PER_S = 1e15  # so fast that nothing is to be waited for


class StepTimes(Protocol):
    """Seconds of one request's steps while nothing else runs."""

    @property
    def is_measured(self) -> bool:
        """Whether the times are a profile's."""
        ...

    def machine_model(self) -> MachineModel:
        """All that is known; all times are 0 while nothing is."""
        ...

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

    @property
    def is_measured(self) -> bool:
        return True

    def machine_model(self) -> MachineModel:
        return self._model

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

    @property
    def is_measured(self) -> bool:
        return False

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

    def machine_model(self) -> MachineModel:
        """Return what has been learned as if it were measured: steps by their tokens, no more.

        Nothing is known of what adapters and contexts add, which is in the steps, and nothing is
        copied to a device: that is for machines with a profile.
        """
        return MachineModel(
            num_layers=1,
            step_s=self._steps() or Curve((1.0,), (0.0,)),
            groups=(),
            invocation_s=0.0,
            lora=LoraModel(
                decode_s_per_byte=0.0, decode_fixed_s=0.0, prefill_s_per_token_byte=0.0,
                prefill_fixed_s=0.0,
            ),
            link=LinkModel(bytes_per_s=_NO_LINK_BYTES_PER_S, latency_s=0.0),
            num_workers=0,
            tokens_per_worker=0,
        )  # fmt: skip

    def _at(self, num_tokens: int) -> float:
        curve = self._steps()
        return 0.0 if curve is None else curve.at(num_tokens)

    def _steps(self) -> Curve | None:
        """Seconds over tokens; None while nothing is known."""
        if self._curve is None and self._means:
            self._curve = Curve.rising(dict(self._means.values()))
        return self._curve
