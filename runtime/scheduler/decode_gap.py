"""Bounds the prompt tokens of a step while other requests wait for their next token. Pure."""

from ...profiles.models import MachineModel
from ...profiles.step_time import NO_ROWS, RowCosts, pass_s, row_costs
from ..request import Request
from .cold import StepRows
from .limits import SchedulerConfig
from .step_times import StepPace, StepTimes, costs_of

_AIM = 0.9  # of the bound, because durations of steps vary
_DEFAULT_DECODE_STEPS = 5
_KEPT_RATE = 0.97  # of prefill, by default
_UNMEASURED_DIVISOR = 4  # 1/4 of the tokens of a step, by default and without a profile


class DecodeGap:
    """Limits the prompt tokens of steps that have decode rows.

    With ``--max-decode-gap-s`` a step gets as many prompt tokens as it is predicted to compute in
    that time, at least one block. By default the time is that of five steps with only the decode
    rows. A step may exceed the default time to prefill efficiently: it may always have the fewest
    prompt tokens that keep 97 % of the rate of prefill or, without a profile, a quarter of
    ``max_num_batched_tokens``. Times come from the profile, at the pace of the last steps. Without
    a profile they are learned from steps, and there is no bound until one has been measured.
    """

    def __init__(self, config: SchedulerConfig, times: StepTimes | None, pace: StepPace | None) -> None:
        """``times`` and ``pace``: those of the scheduler. Without both there is no bound."""
        self._max_gap_s = config.max_decode_gap_s
        self._max_step_tokens = config.max_num_batched_tokens
        self._block_size = config.block_size
        self._times = times
        self._pace = pace
        self._efficient_tokens: dict[int, int] = {}  # by the bytes of adapters
        self.bound_s = 0.0  # of the last step that had one

    def max_tokens(self, rows: StepRows, request: Request, num_tokens: int, *, is_cold: bool) -> int:
        """Return how many of the next ``num_tokens`` tokens of ``request`` may join ``rows``.

        O(rows + log(tokens)).
        """
        model = self._model
        if model is None or num_tokens <= 1 or not _is_awaited(rows):
            return num_tokens
        step = _StepCosts(model, rows, is_cold=is_cold)
        num_others = step.num_prefill_tokens
        if self._max_gap_s is None:
            fewest = max(0, self._least_tokens(model, request.adapter_bytes) - num_others)
            aim_s = max(_DEFAULT_DECODE_STEPS * step.decode_s(), step.step_s(request, fewest))
            self.bound_s = self._slowness * aim_s / _AIM
        else:
            fewest = max(0, self._block_size - num_others)
            self.bound_s = self._max_gap_s
            aim_s = _AIM * self._max_gap_s / self._slowness
        if fewest >= num_tokens or step.step_s(request, num_tokens) <= aim_s:
            return num_tokens
        return self._most_tokens(step, request, range(fewest, num_tokens), aim_s)

    @property
    def _model(self) -> MachineModel | None:
        if self._pace is not None:
            return self._pace.model
        return None if self._times is None else self._times.machine_model()

    @property
    def _slowness(self) -> float:
        """Measured over predicted time of the last steps."""
        return 1.0 if self._pace is None else self._pace.measured_over_predicted

    def _most_tokens(self, step: "_StepCosts", request: Request, tokens: range, aim_s: float) -> int:
        """Return the largest of ``tokens`` with which the step takes at most ``aim_s``.

        It is the smallest of them plus whole blocks, and the smallest even if that takes longer.
        """
        low, high = 0, (len(tokens) - 1) // self._block_size
        while low < high:
            middle = (low + high + 1) // 2
            num_tokens = tokens.start + middle * self._block_size
            if step.step_s(request, num_tokens) <= aim_s:
                low = middle
            else:
                high = middle - 1
        return tokens.start + low * self._block_size

    def _least_tokens(self, model: MachineModel, adapter_bytes: int) -> int:
        """Return the prompt tokens that each step may have, even beyond the bound."""
        if self._pace is None and not (self._times is not None and self._times.is_measured):
            return max(self._block_size, self._max_step_tokens // _UNMEASURED_DIVISOR)
        if adapter_bytes not in self._efficient_tokens:
            self._efficient_tokens[adapter_bytes] = self._find_efficient(model, adapter_bytes)
        return self._efficient_tokens[adapter_bytes]

    def _find_efficient(self, model: MachineModel, adapter_bytes: int) -> int:
        """Return the smallest chunk, in whole blocks, that keeps the rate of prefill."""
        size, whole = self._block_size, self._max_step_tokens
        most_s = _prefill_s(model, whole, whole, adapter_bytes) / _KEPT_RATE
        low, high = 1, -(-whole // size)
        while low < high:
            middle = (low + high) // 2
            if _prefill_s(model, whole, middle * size, adapter_bytes) <= most_s:
                high = middle
            else:
                low = middle + 1
        return min(low * size, whole)


class _StepCosts:
    """Predicted times of a step with the rows that it has so far, and one more, cold or warm."""

    def __init__(self, model: MachineModel, rows: StepRows, *, is_cold: bool) -> None:
        self._model = model
        self._is_decode_separate = rows.is_decode_separate
        self._num_rows = len(rows.decodes) + len(rows.chunks) + len(rows.cold_chunks)
        self._decodes = costs_of(model, [(request, 1) for request in rows.decodes])
        warm = costs_of(model, rows.chunks)
        cold = costs_of(model, [(request, cold.num_tokens) for request, cold in rows.cold_chunks])
        # The pass that the row joins, and another one of chunks, if there is one.
        self._chunks, self._others = warm.plus(cold), NO_ROWS
        if rows.is_cold_separate:
            self._chunks, self._others = (cold, warm) if is_cold else (warm, cold)
        self._is_cold_separate = is_cold and rows.is_cold_separate
        self._num_decodes = len(rows.decodes)
        self.num_prefill_tokens = warm.num_prefill_tokens + cold.num_prefill_tokens

    def decode_s(self) -> float:
        """Return the time of a step with only the decode rows."""
        return _step_s(self._model, self._num_decodes, self._decodes)

    def step_s(self, request: Request, num_tokens: int) -> float:
        """Return the time of the step with ``num_tokens`` tokens of ``request`` added."""
        model = self._model
        chunks, others = self._chunks.plus(costs_of(model, [(request, num_tokens)])), self._others
        passes = [chunks, others, self._decodes]
        if not self._is_decode_separate:
            passes = [chunks.plus(self._decodes), others]
            if self._is_cold_separate:
                passes = [chunks, others.plus(self._decodes)]
        return _step_s(model, self._num_rows + 1, *(rows for rows in passes if rows != NO_ROWS))


def _is_awaited(rows: StepRows) -> bool:
    """Whether the step computes the next token of a request that already has output."""
    return bool(rows.decodes) or any(request.num_output_tokens for request, _ in rows.chunks)


def _prefill_s(model: MachineModel, num_tokens: int, chunk_tokens: int, adapter_bytes: int) -> float:
    """Return the time of a prompt alone, in chunks."""
    return sum(
        _step_s(
            model, 1, row_costs(model, (min(chunk_tokens, num_tokens - start),), (start,), (adapter_bytes,))
        )
        for start in range(0, num_tokens, chunk_tokens)
    )


def _step_s(model: MachineModel, num_rows: int, *passes: RowCosts) -> float:
    """Return the time of a step of these passes, including the engine's overhead."""
    around_s = model.host_step_s + model.turn_s + model.turn_row_s * num_rows
    return around_s + sum(pass_s(model, costs) for costs in passes)
