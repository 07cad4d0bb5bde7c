"""How many threads the CPU device should use for a model: all of them, or one.

Every parallel region ends in a barrier. A model whose matrices fit a core's cache gains nothing
from a second core and, where other programs want the cores as well, waits at every barrier.
"""

import logging
import time
from collections.abc import Callable

import torch

from ..forward.kernel_threads import set_kernel_threads
from ..model.probe import ProbeRow
from .runner import ModelRunner

_LOG = logging.getLogger(__name__)

_DECODE_START = 40  # tokens of context of the decode rows
_PREFILL_TOKENS = 32  # per row
_NUM_ROUNDS = 7
# One thread is chosen if it takes no longer than this much of the time of all threads, in decode
# and in prefill: it leaves the other cores to the rest of the machine.
_ACCEPTED_RATIO = 1.1
# Larger models gain from every core; a measurement in a moment when other programs held the cores
# must not talk them out of it.
_MAX_SMALL_MODEL_BYTES = 64 * 2**20


def set_threads(num_threads: int) -> None:
    """Let torch and numba use ``num_threads`` in this process."""
    torch.set_num_threads(num_threads)
    set_kernel_threads(num_threads)


def probe_tokens() -> int:
    """Tokens per sequence that ``choose_threads`` writes to the pool."""
    return max(_DECODE_START + 1, _PREFILL_TOKENS)


def choose_threads(runner: ModelRunner, max_threads: int, weight_bytes: int) -> int:
    """Measure a small model with one thread and with all, set the better number, return it.

    Changes this process's threads, so it is for a process that is corun's own.
    """
    if max_threads == 1 or weight_bytes > _MAX_SMALL_MODEL_BYTES:
        set_threads(max_threads)
        return max_threads
    all_ms = _measure_ms(runner, max_threads)
    one_ms = _measure_ms(runner, 1)
    is_one_enough = all(
        one <= _ACCEPTED_RATIO * many for one, many in zip(one_ms, all_ms, strict=True)
    )
    chosen = 1 if is_one_enough else max_threads
    set_threads(chosen)
    _LOG.info(
        "threads: %d (decode, prefill: %.2f, %.2f ms with 1 thread, %.2f, %.2f ms with %d)",
        chosen, *one_ms, *all_ms, max_threads,
    )  # fmt: skip
    return chosen


def _measure_ms(runner: ModelRunner, num_threads: int) -> tuple[float, float]:
    """Shortest times of a decode and of a prefill step of two rows."""
    set_threads(num_threads)
    decode = [ProbeRow(sequence, _DECODE_START, (1,)) for sequence in (0, 1)]
    prefill = [ProbeRow(sequence, 0, (1,) * _PREFILL_TOKENS) for sequence in (0, 1)]
    return (
        _shortest_ms(lambda: runner.probe_step(decode)),
        _shortest_ms(lambda: runner.probe_step(prefill)),
    )


def _shortest_ms(step: Callable[[], object]) -> float:
    shortest_s = float("inf")
    for _ in range(_NUM_ROUNDS):
        start = time.perf_counter()
        step()
        shortest_s = min(shortest_s, time.perf_counter() - start)
    return shortest_s * 1e3
