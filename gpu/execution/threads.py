"""Chooses how many threads the CPU device uses for a model: all of them, or one.

Every parallel region ends in a barrier. A model with matrices that fit a core's cache gains nothing
from a second core and waits at every barrier if other programs use the cores.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch

from ...runtime.kept_records import read_record, write_record
from ..forward.kernel_threads import set_kernel_threads
from ..model.probe import ProbeRow
from ..quiet_time import quiet_s, take_samples
from .runner import ModelRunner

_LOG = logging.getLogger(__name__)

_DECODE_START = 40  # context tokens of the decode rows
_PREFILL_TOKENS = 32  # per row
_NUM_ROUNDS = 7
_LIMIT_S = 0.5  # per kind of step, on a machine that is not quiet
# One thread is chosen if it takes at most this share of the time of all threads, in decode and in
# prefill: it leaves the other cores to the rest of the machine.
_ACCEPTED_RATIO = 1.1
# Larger models gain from every core; a measurement while other programs used the cores must not
# reduce their threads.
_MAX_SMALL_MODEL_BYTES = 64 * 2**20


def set_threads(num_threads: int) -> None:
    """Make torch and numba use ``num_threads`` in this process."""
    torch.set_num_threads(num_threads)
    set_kernel_threads(num_threads)


def probe_tokens() -> int:
    """Tokens per sequence that ``choose_threads`` writes to the pool."""
    return max(_DECODE_START + 1, _PREFILL_TOKENS)


def choose_threads(runner: ModelRunner, max_threads: int, weight_bytes: int, kept: Path | None = None) -> int:
    """Measure a small model with one thread and with all, set the better number, return it.

    If other processes disturb the measurement, it is ``max_threads``. ``kept``: the file with an
    earlier result; None = none.
    Changes this process's threads, so the process must be corun's own.
    """
    if max_threads == 1 or weight_bytes > _MAX_SMALL_MODEL_BYTES:
        set_threads(max_threads)
        return max_threads
    known = None if kept is None else read_record(kept, int)
    if known in (1, max_threads):
        set_threads(known)
        _LOG.info("threads: %d (measured at an earlier start)", known)
        return known
    all_ms = _measure_ms(runner, max_threads)
    one_ms = None if all_ms is None else _measure_ms(runner, 1)
    if all_ms is None or one_ms is None:
        set_threads(max_threads)
        _LOG.info("threads: %d (not measured, because others use the CPU cores)", max_threads)
        return max_threads
    is_one_enough = all(one <= _ACCEPTED_RATIO * many for one, many in zip(one_ms, all_ms, strict=True))
    chosen = 1 if is_one_enough else max_threads
    set_threads(chosen)
    if kept is not None:
        write_record(kept, chosen, "the next start measures the number of threads again")
    _LOG.info(
        "threads: %d (decode %.2f ms, prefill %.2f ms with 1 thread; %.2f and %.2f ms with %d)",
        chosen,
        *one_ms,
        *all_ms,
        max_threads,
    )
    return chosen


def _measure_ms(runner: ModelRunner, num_threads: int) -> tuple[float, float] | None:
    """Quiet times of a decode and of a prefill step of two rows; None if there are none of one."""
    set_threads(num_threads)
    decode = [ProbeRow(sequence, _DECODE_START, (1,)) for sequence in (0, 1)]
    prefill = [ProbeRow(sequence, 0, (1,) * _PREFILL_TOKENS) for sequence in (0, 1)]
    decode_ms = _quiet_ms(lambda: runner.probe_step(decode))
    if math.isinf(decode_ms):
        return None
    prefill_ms = _quiet_ms(lambda: runner.probe_step(prefill))
    return None if math.isinf(prefill_ms) else (decode_ms, prefill_ms)


def _quiet_ms(step: Callable[[], object]) -> float:
    step()  # starts its threads
    return quiet_s(take_samples(step, _NUM_ROUNDS, _LIMIT_S)) * 1e3
