"""Step times of an engine that reports none, learned from the answers of one gateway. Pure.

Before enough answers are in, every such engine has the same assumed costs, so that routers which
compare costs send a request where the fewest tokens are.
"""

from dataclasses import replace

import msgspec

from ...scheduler.step_times import LearnedTimes
from ..wire import EngineProfile

MIN_ANSWERS = 200  # before times are used


class AnswerTimes:
    """Step times of one engine.

    The first token of an answer takes a step of its prompt and of the running requests. The tokens
    after it take steps of the running requests.
    """

    def __init__(self, max_step_tokens: int) -> None:
        """``max_step_tokens``: the tokens of the engine's largest step."""
        self._max_step_tokens = max_step_tokens
        self._times = LearnedTimes(max_step_tokens)
        self._num_answers = 0

    def first_token(self, num_prompt_tokens: int, num_running: int, duration_s: float) -> None:
        """Learn from the first token of a request that did not wait, nor for its adapter.

        Prompts that take several steps are ignored.
        """
        num_tokens = num_prompt_tokens + num_running
        if num_tokens <= self._max_step_tokens:
            self._times.step_ended(num_tokens, duration_s)

    def other_tokens(self, num_tokens: int, num_running: int, duration_s: float) -> None:
        """Learn from the end of an answer: ``num_tokens`` came in ``duration_s`` after its first.

        ``num_running``: requests of the engine, this one included.
        """
        self._num_answers += 1
        if num_tokens:
            self._times.step_ended(num_running, duration_s / num_tokens)

    def applied_to(self, profile: EngineProfile) -> EngineProfile:
        """Return the engine's profile with the learned times, once there are enough answers."""
        if self._num_answers < MIN_ANSWERS:
            return profile
        step_s = self._times.machine_model().step_s
        return msgspec.structs.replace(profile, machine=replace(profile.machine, step_s=step_s))
