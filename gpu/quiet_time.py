"""Measures durations as on a quiet machine, on one that may not be quiet."""

import math
import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import psutil

from ..cpu_workers.run_queue import RunQueue, all_thread_ids

# A sample counts if the process's threads waited for cores for less than this share of it, and the
# hypervisor withheld less of the cores around it: threads that wait for each other then take
# a hundred times as long, and the kernel's statistics do not call that waiting.
_MAX_WAITED_SHARE = 0.05
_LEAST_SAMPLES = 3  # minimal number of quiet samples


@dataclass(frozen=True, slots=True)
class Sample:
    """One call."""

    took_s: float
    waited_s: float | None  # runnable time of the process's threads without a core; None = unknown
    num_preempted: int = 0  # how often a thread of the process was preempted
    is_stolen: bool = False  # whether the hypervisor withheld cores around the call

    @property
    def is_quiet(self) -> bool:
        """Whether others did not delay the call, as far as known."""
        if self.is_stolen:
            return False
        if self.waited_s is None:
            return self.num_preempted == 0
        return self.waited_s <= _MAX_WAITED_SHARE * self.took_s


def quiet_s(samples: Iterable[Sample]) -> float:
    """The shortest quiet sample; infinite if there are too few. Pure."""
    quiet = [sample.took_s for sample in samples if sample.is_quiet]
    return min(quiet) if len(quiet) >= _LEAST_SAMPLES else math.inf


def take_samples(call: Callable[[], object], num_quiet: int, limit_s: float) -> list[Sample]:
    """Call until this many samples are quiet, but for at most ``limit_s``.

    The computing threads must already run.
    """
    samples: list[Sample] = []
    queue = RunQueue(all_thread_ids())
    end_s = time.perf_counter() + limit_s
    try:
        while True:
            start_s, stolen_s = time.perf_counter(), _stolen_s()
            batch = _take_batch(call, num_quiet, end_s, queue)
            now_s = time.perf_counter()
            is_stolen = _stolen_s() - stolen_s > _MAX_WAITED_SHARE * (now_s - start_s)
            samples += (replace(sample, is_stolen=is_stolen) for sample in batch)
            if now_s >= end_s or not is_stolen:
                return samples
    finally:
        queue.close()


def _take_batch(call: Callable[[], object], num_quiet: int, end_s: float, queue: RunQueue) -> list[Sample]:
    """At least one sample, until this many are quiet or the time is over."""
    samples: list[Sample] = []
    while True:
        before, num_before = _waited_s(queue), _num_preempted()
        start_s = time.perf_counter()
        call()
        took_s = time.perf_counter() - start_s
        after, num_after = _waited_s(queue), _num_preempted()
        waited_s = None if before is None or after is None else after - before
        samples.append(Sample(took_s, waited_s, num_after - num_before))
        if start_s + took_s >= end_s or sum(sample.is_quiet for sample in samples) >= num_quiet:
            return samples


def _stolen_s() -> float:
    """Seconds for which the hypervisor has withheld a core, the mean of this process's; by ticks."""
    times = psutil.cpu_times(percpu=True)
    cpus = os.sched_getaffinity(0)
    return sum(getattr(times[cpu], "steal", 0.0) for cpu in cpus if cpu < len(times)) / len(cpus)


def _waited_s(queue: RunQueue) -> float | None:
    times = queue.read()
    return None if times is None else sum(waited for _, waited in times)


def _num_preempted() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
