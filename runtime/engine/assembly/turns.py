"""How long the engine's own turn takes around a step: to plan it, and to take in its results.

Measured between real steps, for what a step has read and written is what a turn no longer finds in
the caches.
"""

import time
from typing import TYPE_CHECKING

from ....profiles.curve import median
from ....profiles.profile import ProfileError
from ...adapters.registry import AdapterRegistry
from ...memory.make import MemorySizes, make_device_memory
from ...memory.reload_cost import ReloadCosts
from ...plan import AdapterId, Executor, Result, StepPlan
from ...sampling import SamplingParams
from ...scheduler.config import SchedulerConfig
from ...scheduler.policy import PolicyFacts
from ...scheduler.registry import make_policy
from ...scheduler.scheduler import Scheduler
from ...scheduler.step_times import LearnedTimes
from ..core import CoreConfig, EngineCore
from ..messages import AddRequest

if TYPE_CHECKING:
    from ....gpu.execution.assemble import LoadedModel

_FEW_ROWS, _MANY_ROWS = 1, 8
_NUM_TURNS = 32  # of each number of rows
_PROMPT_TOKENS = 8
_TIMEOUT_S = 60.0  # of all turns with so many rows


def measure_turns(loaded: "LoadedModel") -> tuple[float, float]:
    """Seconds of a turn beside the executor's part, and how many each row adds.

    Raises ``ProfileError`` if a step fails.
    """
    from ....gpu.execution.assemble import make_runner
    from ....profiles.measure.steps import make_step_executor

    block_size = loaded.layout.block_size
    context_tokens = _PROMPT_TOKENS + 2 * _NUM_TURNS
    num_blocks = _MANY_ROWS * (1 + -(-context_tokens // block_size))
    executor = make_step_executor(loaded, make_runner(loaded, num_blocks), context_tokens)
    try:
        watched = _Watched(executor)
        core = _core(watched, loaded, num_blocks, context_tokens)
        few_s, many_s = (_turn_s(core, watched, rows) for rows in (_FEW_ROWS, _MANY_ROWS))
    finally:
        executor.close()
    row_s = max(0.0, many_s - few_s) / (_MANY_ROWS - _FEW_ROWS)
    return max(0.0, few_s - row_s * _FEW_ROWS), row_s


class _Watched:
    """An executor, and the seconds that it has had."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.inside_s = 0.0

    def submit(self, plan: StepPlan) -> None:
        start_s = time.perf_counter()
        self._executor.submit(plan)
        self.inside_s += time.perf_counter() - start_s

    def poll(self, timeout_s: float = 0.0) -> list[Result]:
        start_s = time.perf_counter()
        results = self._executor.poll(timeout_s)
        self.inside_s += time.perf_counter() - start_s
        return results

    def fileno(self) -> int:
        return self._executor.fileno()

    def close(self) -> None:
        self._executor.close()


def _core(
    executor: Executor, loaded: "LoadedModel", num_blocks: int, context_tokens: int
) -> EngineCore:
    """An engine's core with the default policies, for requests of the base model."""
    layout = loaded.layout
    num_bytes = num_blocks * layout.block_bytes
    config = SchedulerConfig(
        max_num_batched_tokens=_MANY_ROWS * _PROMPT_TOKENS,
        max_num_seqs=_MANY_ROWS,
        max_model_len=context_tokens,
        block_size=layout.block_size,
    )
    times = LearnedTimes(config.max_num_batched_tokens)
    sizes = MemorySizes(
        capacity_bytes=num_bytes,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        max_model_len=context_tokens,
    )
    costs = ReloadCosts(
        times, layout.block_size, config.max_num_batched_tokens, None, is_assisted=False
    )  # fmt: skip
    facts = PolicyFacts(
        times=times,
        capacity_tokens=num_blocks * layout.block_size,
        bytes_per_token=layout.block_bytes / layout.block_size,
    )
    memory = make_device_memory(sizes, "corun", costs)
    scheduler = Scheduler(config, make_policy("corun", facts), memory, (), times=times)
    return EngineCore(
        scheduler, executor, AdapterRegistry(lambda: AdapterId(1)),
        CoreConfig(base_fingerprint="", dtype=str(loaded.dtype)), clock=time.monotonic,
    )  # fmt: skip


def _turn_s(core: EngineCore, executor: _Watched, num_rows: int) -> float:
    """Of turns that have so many rows decode; the core is idle before and after."""
    sampling = SamplingParams(temperature=0, max_tokens=_NUM_TURNS + 2, ignore_eos=True, seed=0)
    for row in range(1, num_rows + 1):
        core.add_request(AddRequest(row, (row,) * _PROMPT_TOKENS, sampling))
    turns_s = []
    deadline_s = time.monotonic() + _TIMEOUT_S
    while core.has_work:
        start_s, inside_s = time.perf_counter(), executor.inside_s
        updates = core.step(_TIMEOUT_S)
        turns_s.append(time.perf_counter() - start_s - (executor.inside_s - inside_s))
        failed = [update.error for update in updates if update.error is not None]
        if failed or time.monotonic() > deadline_s:
            reason = failed[0] if failed else f"steps do not end within {_TIMEOUT_S:g} s"
            raise ProfileError(f"the engine's turns cannot be measured: {reason}")
    return median(turns_s[1:-1])  # the first has the prompts, the last ends all
