"""A step's prompt tokens are bounded in time while requests that decode wait for it."""

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from corun.profiles.curve import Curve
from corun.profiles.models import MachineModel
from corun.runtime.plan import AdapterId, StepPlan
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk, ColdStarts, StepRows
from corun.runtime.scheduler.scheduler import Scheduler
from corun.runtime.scheduler.step_times import LearnedTimes, ProfiledTimes, StepPace, StepTimes
from corun.runtime.sim.clock import VirtualClock
from corun.runtime.sim.engine import SimulationOptions, build_simulated_parts, request_of
from corun.runtime.sim.machines import AS_MODELLED, Factors, SimulatedMachine
from corun.runtime.sim.papers.machines import MACHINES
from corun.runtime.sim.workloads import Workload, WorkloadRequest
from hypothesis import given, settings
from support.invariants import check_invariants
from support.profiles import PROFILE
from support.scheduling import make_executor, make_memory, make_request, make_scheduler, rows_of

# 10 ms a step, 1 ms a prompt token, 2 ms a row that decodes.
_MODEL: MachineModel = replace(
    PROFILE.model,
    step_s=Curve((0.0, 1.0), (0.0, 0.001)),
    decode_step_s=None,
    host_step_s=0.010,
    host_row_s=0.0,
    prefill_s_per_token_key=0.0,
    decode_s_per_key=0.0,
    read_s=0.0,
    decode_token_share=2.0,
    turn_s=0.0,
    turn_row_s=0.0,
)
_MAX_TOKENS = 512


def make(
    *,
    times: StepTimes | None = None,
    pace: StepPace | None = None,
    max_decode_gap_s: float | None = None,
    mix_decode_with_prefill: bool = True,
    cold_starts: ColdStarts | None = None,
) -> Scheduler:
    return make_scheduler(
        memory=make_memory(num_blocks=2000),
        times=times,
        pace=pace,
        cold_starts=cold_starts,
        max_model_len=4000,
        max_num_batched_tokens=_MAX_TOKENS,
        max_num_seqs=64,
        max_decode_gap_s=max_decode_gap_s,
        mix_decode_with_prefill=mix_decode_with_prefill,
    )


class _Skipping(ColdStarts):
    """Starts every cold request, which then skips each step."""

    def may_start(self, request: Request, num_others: int, rows: StepRows, now_s: float) -> bool:
        return True

    def next_chunk(
        self, request: Request, max_tokens: int, num_others: int, rows: StepRows, now_s: float
    ) -> ColdChunk | None:
        return None


class Steps:
    """Runs steps of a scheduler, each a second long."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._executor = make_executor(scheduler)
        self._now_s = 0.0

    def next_plan(self) -> StepPlan:
        plan = self._scheduler.schedule(self._now_s)
        assert plan is not None
        self._executor.submit(plan)
        self._now_s += 1.0
        for result in self._executor.poll():
            self._scheduler.update(result, self._now_s)
        return plan


def decoding(scheduler: Scheduler, num_rows: int) -> Steps:
    """Let the first ``num_rows`` requests decode from now on."""
    steps = Steps(scheduler)
    for number in range(1, num_rows + 1):
        scheduler.add_request(make_request(number, prompt=4, max_tokens=100), 0.0)
    steps.next_plan()
    return steps


def chunk_beside(scheduler: Scheduler, steps: Steps, *, prompt: int = 2000) -> int:
    """Return the prompt tokens of the next step."""
    scheduler.add_request(make_request(99, prompt=prompt, max_tokens=2), 0.0)
    return rows_of(steps.next_plan())[99][2]


class TestWithAProfile:
    @pytest.mark.parametrize("mix", [True, False])
    def test_a_chunk_ends_with_the_time(self, mix: bool) -> None:
        """0.9 of 0.2 s; a pass of its own costs nothing on this machine."""
        scheduler = make(
            times=ProfiledTimes(_MODEL, _MAX_TOKENS), max_decode_gap_s=0.2, mix_decode_with_prefill=mix
        )
        steps = decoding(scheduler, 5)
        assert chunk_beside(scheduler, steps) == (180 - 10 - 5 * 2) // 4 * 4
        assert scheduler.decode_gap.bound_s == 0.2

    def test_nothing_is_cut_where_no_row_decodes(self) -> None:
        scheduler = make(times=ProfiledTimes(_MODEL, _MAX_TOKENS), max_decode_gap_s=0.2)
        assert chunk_beside(scheduler, Steps(scheduler)) == _MAX_TOKENS

    def test_a_block_is_computed_however_short_the_time(self) -> None:
        scheduler = make(times=ProfiledTimes(_MODEL, _MAX_TOKENS), max_decode_gap_s=0.001)
        assert chunk_beside(scheduler, decoding(scheduler, 5)) == 4

    def test_what_ends_a_prompt_in_time_is_not_cut(self) -> None:
        scheduler = make(times=ProfiledTimes(_MODEL, _MAX_TOKENS), max_decode_gap_s=0.2)
        assert chunk_beside(scheduler, decoding(scheduler, 5), prompt=159) == 159

    def test_prompts_share_the_time(self) -> None:
        scheduler = make(times=ProfiledTimes(_MODEL, _MAX_TOKENS), max_decode_gap_s=0.2)
        steps = decoding(scheduler, 5)
        for number in (11, 12, 13):
            scheduler.add_request(make_request(number, prompt=100, max_tokens=2), 0.0)
        rows = rows_of(steps.next_plan())
        assert (rows[11][2], rows[12][2], 13 in rows) == (100, 60, False)

    def test_a_cold_prompt_that_skips_a_step_leaves_its_time_to_others(self) -> None:
        """Others have the 160 tokens of time, and the one that is cut closes the step."""
        scheduler = make(
            times=ProfiledTimes(_MODEL, _MAX_TOKENS), max_decode_gap_s=0.2, cold_starts=_Skipping()
        )
        steps = decoding(scheduler, 5)
        cold = make_request(11, prompt=500, adapter_id=AdapterId(1), adapter_bytes=100)
        for request in (cold, make_request(12, prompt=100), make_request(13, prompt=100)):
            scheduler.add_request(request, 0.0)
        rows = rows_of(steps.next_plan())
        assert (11 in rows, rows[12][2], rows[13][2]) == (False, 100, 60)

    def test_by_default_five_decode_steps(self) -> None:
        """Of 40 rows, which take 90 ms: 450 in all, so 360 tokens, but for rounding."""
        scheduler = make(times=ProfiledTimes(_MODEL, _MAX_TOKENS))
        assert chunk_beside(scheduler, decoding(scheduler, 40)) in (356, 360)
        assert scheduler.decode_gap.bound_s == pytest.approx(0.45 / 0.9)

    def test_by_default_at_least_what_keeps_the_prefill_rate(self) -> None:
        """512 tokens take 522 ms; in n chunks 512 + 10 n, which may be 538: two."""
        scheduler = make(times=ProfiledTimes(_MODEL, _MAX_TOKENS))
        assert chunk_beside(scheduler, decoding(scheduler, 1)) == 256

    @pytest.mark.parametrize(("first", "second"), [(256, 0), (200, 56)])
    def test_by_default_prompts_share_the_least_chunk(self, first: int, second: int) -> None:
        scheduler = make(times=ProfiledTimes(_MODEL, _MAX_TOKENS))
        steps = decoding(scheduler, 1)
        scheduler.add_request(make_request(11, prompt=first, max_tokens=2), 0.0)
        scheduler.add_request(make_request(12, prompt=500, max_tokens=2), 0.0)
        rows = rows_of(steps.next_plan())
        assert rows[11][2] == first
        assert (rows[12][2] if 12 in rows else 0) == second

    def test_a_machine_that_is_slower_than_its_profile_has_shorter_chunks(self) -> None:
        pace = StepPace(_MODEL)
        scheduler = make(pace=pace, max_decode_gap_s=2.0)
        steps = decoding(scheduler, 5)  # steps take a second, not 30 ms
        slowness = pace.measured_over_predicted
        assert slowness == pytest.approx(1.0 / (0.010 + 20 * 0.001))
        assert chunk_beside(scheduler, steps) == (int(1800 / slowness) - 10 - 5 * 2) // 4 * 4


class TestWithoutAProfile:
    def test_nothing_is_cut_while_nothing_is_known(self) -> None:
        scheduler = make(max_decode_gap_s=0.001)
        assert chunk_beside(scheduler, decoding(scheduler, 1)) == _MAX_TOKENS - 1

    def test_what_steps_have_taken_says_how_long_one_takes(self) -> None:
        times = LearnedTimes(_MAX_TOKENS)
        scheduler = make(times=times, max_decode_gap_s=2.0)
        steps = decoding(scheduler, 5)
        times.step_ended(500, 5.0)  # after 20 tokens in 1 s: 1/120 s for each more
        assert chunk_beside(scheduler, steps) == (20 + int(0.8 * 120) - 5) // 4 * 4

    def test_by_default_at_least_a_quarter_of_a_full_step(self) -> None:
        times = LearnedTimes(_MAX_TOKENS)
        scheduler = make(times=times)
        steps = decoding(scheduler, 1)
        times.step_ended(1, 0.01)
        times.step_ended(512, 50.0)
        assert chunk_beside(scheduler, steps) == _MAX_TOKENS // 4


@settings(deadline=None, max_examples=60)
@given(
    gap_s=st.none() | st.floats(0.001, 1.0),
    num_decodes=st.integers(1, 12),
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    step_s=st.floats(0.0, 0.05),
    token_s=st.floats(1e-5, 0.005),
    mix=st.booleans(),
)
def test_every_step_keeps_the_bound_or_computes_the_least(
    gap_s: float | None, num_decodes: int, prompts: list[int], step_s: float, token_s: float, mix: bool
) -> None:
    """Each step has at least one prompt token if there are any, so all prompts end."""
    model = replace(_MODEL, host_step_s=step_s, step_s=Curve((0.0, 1.0), (0.0, token_s)))
    scheduler = make(
        times=ProfiledTimes(model, _MAX_TOKENS), max_decode_gap_s=gap_s, mix_decode_with_prefill=mix
    )
    steps = decoding(scheduler, num_decodes)
    for number, prompt in enumerate(prompts, start=100):
        scheduler.add_request(make_request(number, prompt=prompt, max_tokens=1), 0.0)
    left = sum(prompts)
    while left:
        rows = rows_of(steps.next_plan())
        assert all(number in rows for number in range(1, num_decodes + 1)), "all decode"
        tokens = [number for request_id, (_, _, number, _) in rows.items() if request_id >= 100]
        assert sum(tokens) > 0
        left -= sum(tokens)
        took_s = step_s + token_s * (2.0 * num_decodes + sum(tokens))
        bound_s = scheduler.decode_gap.bound_s if gap_s is None else gap_s
        # A row of one token is no chunk.
        assert took_s <= bound_s or sum(one for one in tokens if one > 1) <= 4
    check_invariants(scheduler)


# A model of 1.2 billion parameters in bfloat16 on two cores: it reads its weights in 60 ms, and
# computes 230 prompt tokens a second.
_ONE_BILLION = SimulatedMachine(
    name="1 B",
    model=replace(
        MACHINES["a40-llama8b"].model,
        step_s=Curve((0.0, 1.0, 8.0, 14.0, 512.0), (0.0, 0.060, 0.061, 0.062, 2.2)),
        decode_step_s=None,
        host_step_s=0.002,
        host_row_s=0.0,
        read_s=0.0,
        decode_token_share=1.0,
        prefill_s_per_token_key=1e-7,
        decode_s_per_key=5e-8,
        turn_s=0.0005,
        turn_row_s=1e-5,
    ),
    memory_bytes=2**32,
    kv_bytes_per_token=2**15,
    adapter_bytes_per_rank=2**19,
    group_targets=(3, 1, 2, 1),
    file_bytes_per_s=1e9,
    max_num_seqs=8,
    has_pages=False,
)


@dataclass(frozen=True)
class _Served:
    gaps_s: list[float]  # ascending
    duration_s: float
    bound_s: float

    @property
    def p95_gap_s(self) -> float:
        return self.gaps_s[int(0.95 * len(self.gaps_s))]


def served_by_eight_clients(max_decode_gap_s: float | None, *, factors: Factors = AS_MODELLED) -> _Served:
    """24 prompts of 1024 tokens, answers of 64, ten adapters; checks parts of first tokens.

    A client sends its next request when the last one has ended.
    """
    requests = tuple(WorkloadRequest(0.0, number % 10, 1024, 64) for number in range(24))
    workload = Workload(requests, (8, 16, 32, 64, 8, 16, 32, 64, 8, 16), 64)
    clock = VirtualClock()
    options = SimulationOptions(scheduling_policy="corun", max_decode_gap_s=max_decode_gap_s, factors=factors)
    parts = build_simulated_parts(_ONE_BILLION, workload, options, clock=clock, sleep=clock.sleep)
    sent_s: dict[int, float] = {}
    tokens_s = defaultdict[int, list[float]](list)

    def send_next() -> None:
        request = request_of(workload, len(sent_s) + 1)
        sent_s[request.request_id] = clock()
        parts.core.add_request(request)

    for _ in range(8):
        send_next()
    while parts.core.has_work:
        for update in parts.core.step(1.0):
            if update.timing is not None:
                waited_s = clock() - sent_s[update.request_id]
                assert sum(update.timing.parts.values()) == pytest.approx(waited_s)
            tokens_s[update.request_id] += [clock()] * len(update.token_ids)
            if update.finish_reason is not None and len(sent_s) < len(requests):
                send_next()
    parts.executor.close()
    gaps_s = sorted(b - a for times_s in tokens_s.values() for a, b in pairwise(times_s))
    assert len(gaps_s) == 24 * 63
    return _Served(gaps_s, clock(), parts.scheduler.decode_gap.bound_s)


_UNBOUNDED = served_by_eight_clients(1e4)


def test_gaps_beside_long_prompts_without_a_bound() -> None:
    assert _UNBOUNDED.p95_gap_s > 2.2


def test_by_default_gaps_are_short_and_prefill_keeps_its_rate() -> None:
    served = served_by_eight_clients(None)
    assert served.bound_s < 0.4
    assert served.p95_gap_s <= served.bound_s
    assert _UNBOUNDED.duration_s / served.duration_s >= 0.97


@pytest.mark.parametrize("gap_s", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("slowness", [0.7, 1.0, 2.0])
def test_gaps_keep_the_bound_that_is_asked_for(gap_s: float, slowness: float) -> None:
    """Also on a machine that is slower than its profile: chunks follow the measured pace."""
    served = served_by_eight_clients(gap_s, factors=Factors(step=slowness))
    assert served.p95_gap_s <= gap_s
