"""The engine's waiting time for workers beyond their arithmetic, by input group."""

import time
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from corun.cpu_workers.pool import WorkerPool
from corun.gpu.coexec.invocation import Invocation
from corun.gpu.lora.adapter_layout import GroupKey
from corun.shm.job import Job


@dataclass(frozen=True, slots=True)
class _Job:
    key: GroupKey
    sequence: int
    signalled_ns: int
    wait_begins_ns: int
    wait_ends_ns: int


@dataclass(frozen=True, slots=True)
class GroupWait:
    """One input group of one pass, in microseconds."""

    exposed_us: float  # from the end of the base products on
    beyond_us: float  # part after the end of a worker that begins at the signal
    duration_us: float  # of the workers' arithmetic


class WaitRecorder:
    """Takes times around a handover, and little else, as these runs are compared with others.

    Shared memory is read when the passes are over.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._signals: list[tuple[Invocation, int]] = []
        self._begins_ns: list[int] = []
        self._ends: list[tuple[Invocation, int]] = []

    def watch(self, handover: Any) -> None:
        """From now on, where what is enqueued takes effect at once: on the CPU."""
        send, wait = handover.send, handover.wait

        def timed_send(invocation: Invocation, x: torch.Tensor) -> None:
            send(invocation, x)
            self.signalled(invocation)

        def timed_wait(invocation: Invocation) -> None:
            self.wait_begins()
            wait(invocation)
            self.wait_ends(invocation)

        handover.send, handover.wait = timed_send, timed_wait

    def signalled(self, invocation: Invocation) -> None:
        """X is out and the worker may begin."""
        self._signals.append((invocation, time.perf_counter_ns()))

    def wait_begins(self) -> None:
        """The base products of a group are done."""
        self._begins_ns.append(time.perf_counter_ns())

    def wait_ends(self, invocation: Invocation) -> None:
        """Y is there."""
        self._ends.append((invocation, time.perf_counter_ns()))

    def take(self) -> list[GroupWait]:
        """Waits since the last call, while their results still lie in the mailboxes."""
        signalled_ns = {invocation.sequence: at_ns for invocation, at_ns in self._signals}
        jobs = [
            _Job(one.key, one.sequence, signalled_ns[one.sequence], begins_ns, ends_ns)
            for begins_ns, (one, ends_ns) in zip(self._begins_ns, self._ends, strict=True)
        ]
        self._signals, self._begins_ns, self._ends = [], [], []
        waits = []
        for _, of_key in groupby(jobs, key=lambda job: job.key):
            wait = self._of_group(list(of_key))
            if wait is not None:
                waits.append(wait)
        return waits

    def _of_group(self, jobs: list[_Job]) -> GroupWait | None:
        """Jobs of one worker follow each other: each begins when it may and when it can."""
        free_ns = total_us = 0.0
        for job in jobs:
            duration_us = self._duration_us(job)
            if duration_us is None:
                return None
            free_ns = max(free_ns, job.signalled_ns) + duration_us * 1e3
            total_us += duration_us
        begins_ns, ends_ns = jobs[0].wait_begins_ns, jobs[-1].wait_ends_ns
        due_ns = max(begins_ns, free_ns)
        return GroupWait((ends_ns - begins_ns) / 1e3, (ends_ns - due_ns) / 1e3, total_us)

    def _duration_us(self, job: _Job) -> float | None:
        """None if the slot holds another job by now."""
        mailbox = self._pool.end.mailbox
        result = Job.read(mailbox.buffer, mailbox.job_offset(job.sequence))
        return float(result.duration_us) if result.sequence == job.sequence else None
