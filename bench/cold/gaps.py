"""The cost of cold arrivals for running requests: gaps between tokens of eight requests."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paired import Ratio, compare, ratio_of

from cold.cells import cached_first_s, percentile
from cold.rig import CACHED, NEVER_WAIT, Rig, check_update
from cold.workload import adapter_name

NUM_RUNNING = 8
RUNNING_ADAPTER = adapter_name(16, "qkvo")
COLD_ADAPTER = adapter_name(64, "qkvo")
COLD_TOKENS = 32
_COLD_OUTPUT_TOKENS = 4
_RUNNING_PROMPT_TOKENS = 16
# Arrivals after this number of tokens of the running requests: steps with their prefill are more
# than a twentieth of all steps and decide the 95th percentile.
_ARRIVAL_EVERY = 12
_SHARE = 0.95
_DEADLINE_S = 120.0


@dataclass(slots=True)
class _Episode:
    """Running requests, and one arrival after the other."""

    rig: Rig
    is_cold: bool
    num_arrivals: int

    def run(self) -> list[float]:
        """Gaps in seconds between tokens of the running requests, from the first arrival on."""
        rig = self.rig
        rig.prepare(RUNNING_ADAPTER, is_cold=False)
        rig.prepare(COLD_ADAPTER, is_cold=self.is_cold)
        rig.use(NEVER_WAIT if self.is_cold else CACHED)
        running = self._start_running()
        gaps: list[float] = []
        last_s: dict[int, float] = {}
        arrived: int | None = None  # the request that came last, while it is open
        num_arrived, steps_since, must_evict = 0, 0, False
        deadline_s = time.monotonic() + _DEADLINE_S
        while num_arrived < self.num_arrivals or arrived is not None:
            if must_evict:
                must_evict = not rig.core.evict_adapter(COLD_ADAPTER)
            is_due = arrived is None and not must_evict and steps_since >= _ARRIVAL_EVERY
            if is_due and num_arrived < self.num_arrivals:
                arrived = self._arrive()
                num_arrived, steps_since = num_arrived + 1, 0
            has_token = False
            for update in rig.core.step(1.0):
                check_update(update.error)
                now_s = time.perf_counter()
                if update.request_id in running and update.token_ids:
                    if update.request_id in last_s and num_arrived:
                        gaps.append(now_s - last_s[update.request_id])
                    last_s[update.request_id] = now_s
                    has_token = True
                elif update.request_id == arrived and update.finish_reason is not None:
                    arrived, must_evict = None, self.is_cold
            steps_since += has_token
            if time.monotonic() > deadline_s:
                raise TimeoutError("the arrivals are not served")
        rig.core.abort(sorted(running))
        rig.finish()
        return gaps

    def _start_running(self) -> set[int]:
        """As many as are to run, with more tokens to come than the episode takes."""
        rig = self.rig
        num_tokens = 2 * _ARRIVAL_EVERY * (self.num_arrivals + 2) + 200
        running = set()
        for _ in range(NUM_RUNNING):
            prompt = rig.prompt(_RUNNING_PROMPT_TOKENS)
            message = rig.request(prompt, RUNNING_ADAPTER, num_tokens)
            rig.core.add_request(message)
            running.add(message.request_id)
        gc.collect()
        return running

    def _arrive(self) -> int:
        message = self.rig.request(self.rig.prompt(COLD_TOKENS), COLD_ADAPTER, _COLD_OUTPUT_TOKENS)
        self.rig.core.add_request(message)
        return message.request_id


@dataclass(frozen=True, slots=True)
class GapResult:
    """The 95th percentile of the gaps with cold arrivals, against that with cached ones."""

    ratio: Ratio
    control: Ratio
    cold_ms: tuple[float, ...]
    cached_ms: tuple[float, ...]
    median_ratio: Ratio  # of the median gaps

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "p95_ratio": self.ratio.to_json(),
            "p95_cold_ms": [round(value, 2) for value in self.cold_ms],
            "p95_cached_ms": [round(value, 2) for value in self.cached_ms],
            "median_ratio": self.median_ratio.to_json(),
            "control": self.control.to_json(),
            "control_spread": round(self.control.spread, 4),
        }


def measure_gaps(rig: Rig, num_pairs: int, num_arrivals: int, load_ratio: float) -> GapResult:
    """Episodes with cold and with cached arrivals in turn; then cached ones against themselves."""
    rig.set_up_free()
    rig.use(CACHED)
    prefill_s = cached_first_s(rig, COLD_ADAPTER, COLD_TOKENS)
    rig.set_up(rig.adapter_bytes(COLD_ADAPTER) / (load_ratio * prefill_s), 1.0)
    medians: dict[bool, list[float]] = {True: [], False: []}

    def p95_ms(*, is_cold: bool) -> float:
        gaps = _Episode(rig, is_cold, num_arrivals).run()
        medians[is_cold].append(percentile(gaps, 0.5))
        return percentile(gaps, _SHARE) * 1e3

    p95_ms(is_cold=True)
    medians[True].clear()
    ratio, cold_ms, cached_ms = compare(
        lambda: p95_ms(is_cold=True), lambda: p95_ms(is_cold=False), num_pairs, progress="gaps"
    )
    median_ratio = _ratio(medians[True], medians[False])
    control, _, _ = compare(lambda: p95_ms(is_cold=False), lambda: p95_ms(is_cold=False), num_pairs)
    return GapResult(ratio, control, tuple(cold_ms), tuple(cached_ms), median_ratio)


def _ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    return ratio_of([x / y for x, y in zip(a, b, strict=True)])
