"""The load of an engine, for routers on other machines. Pure."""

from collections import Counter

from ..engine_state import EngineLoadState
from ..memory.transfers import TransferTable
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_times import StepTimes


class OpenWork:
    """Sums over open requests. O(running requests)."""

    def __init__(self, scheduler: Scheduler) -> None:
        running = self.num_running_by_rank = Counter[int]()
        self.num_waiting_by_rank = scheduler.waiting.num_by_rank.copy()
        queued_tokens, context_tokens = scheduler.waiting.num_tokens, 0
        for request in scheduler.running:
            num_computed, num_prompt = request.num_computed_tokens, len(request.prompt_token_ids)
            running[request.adapter_rank] += 1
            context_tokens += num_computed
            if num_computed < num_prompt:
                queued_tokens += num_prompt - num_computed
        self.queued_tokens = queued_tokens  # not computed yet, of prompts and preempted requests
        self.context_tokens = context_tokens  # computed, of running requests

    def wait(self, rank: int, num_prompt_tokens: int) -> None:
        """Add a waiting request that the scheduler does not know yet."""
        self.num_waiting_by_rank[rank] += 1
        self.queued_tokens += num_prompt_tokens


def load_state(scheduler: Scheduler, work: OpenWork) -> EngineLoadState:
    """Return the load; ``work``: of the scheduler's requests and held ones. O(transfers)."""
    memory, config = scheduler.memory, scheduler.config
    pace = scheduler.pace
    return EngineLoadState(
        num_running_by_rank=dict(work.num_running_by_rank),
        num_waiting_by_rank=dict(work.num_waiting_by_rank),
        queued_prefill_tokens=work.queued_tokens,
        running_context_tokens=work.context_tokens,
        free_kv_tokens=memory.num_free_blocks * config.block_size,
        promised_kv_tokens=memory.num_reserved_blocks * config.block_size,
        total_kv_tokens=memory.num_blocks * config.block_size,
        queued_s=_queued_s(scheduler.times, work.queued_tokens, config.max_num_batched_tokens),
        link_backlog_bytes=_backlog_bytes(memory.transfers),
        measured_over_predicted=1.0 if pace is None else round(pace.measured_over_predicted, 4),
    )


def _queued_s(times: StepTimes | None, num_tokens: int, step_tokens: int) -> float:
    """Return the time of the steps that compute ``num_tokens`` of prompts, in full steps."""
    if times is None:
        return 0.0
    num_full, num_left = divmod(num_tokens, step_tokens)
    full_s = num_full * times.prefill_s(step_tokens, 0) if num_full else 0.0
    return full_s + (times.prefill_s(num_left, 0) if num_left else 0.0)


def _backlog_bytes(transfers: TransferTable) -> int:
    """Return the bytes still to be copied over the link."""
    return sum(sum(one.part_bytes[one.num_arrived :]) for one in transfers)
