"""CPU workers as processes of a symbolic program, behind what ``WorkerGateway`` asks of a pool."""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from corun.cpu_workers.teams import TeamJob
from corun.gpu.device.base import Word
from corun.shm.job import Job
from corun.shm.words import wrap
from support.streams.symbolic import Process, SymbolicDevice
from support.streams.symbolic_program import Buffer
from support.streams.symbolic_tensors import SymbolicTensor

_FIRST_SEQUENCE = 2**31 - 2  # wraps around on the way
_BEFORE = _FIRST_SEQUENCE - 1
_X, _Y = 0, 1  # offsets of x and y


class _Worker:
    """One worker and its words. After its death, the same agent answers for it."""

    def __init__(self, device: SymbolicDevice, index: int) -> None:
        self.process: Process = device.process(f"worker {index}")
        self.arrived = device.word(f"arrived {index}", initial=_BEFORE)
        self.finished = device.word(f"finished {index}", initial=_BEFORE)
        self.h, self.y = Buffer(f"h of {index}"), Buffer(f"y of {index}")


class SymbolicPool:
    """What ``WorkerGateway`` knows of a pool, its mailbox, its rows and its control segment.

    ``dies_in``: jobs, by number, in which worker 0 dies; it is replaced for the next pass.
    """

    def __init__(
        self, device: SymbolicDevice, num_workers: int, max_tokens: int, dies_in: Collection[int]
    ) -> None:
        self.device, self.host = device, device.host
        self.config = SimpleNamespace(max_tokens=max_tokens, num_job_slots=64)
        self.published = device.word("published", initial=_BEFORE)
        self.ready = device.word("ready", initial=_BEFORE)
        self.done = device.word("done", initial=_BEFORE)
        self.workers = [_Worker(device, index) for index in range(num_workers)]
        self.last_member = device.process("the last member")  # moves ``done`` on
        self.x, self.y = Buffer("x of workers"), [worker.y for worker in self.workers]
        self.host.compute(writes=[self.x, *self.y, *(worker.h for worker in self.workers)])  # zeros
        self.regions: dict[int, Buffer] = {}  # of the arena, by offset
        self.address = 0  # of the control segment
        self.ready_address, self.done_address = 0, 1
        self.num_published = self.num_taken = 0
        self._failed: set[int] = set()  # jobs, by number
        self._dies_in = dies_in
        self._is_dead = False

    @property
    def end(self) -> "SymbolicPool":
        """It is its mailbox, too."""
        return self

    @property
    def num_outstanding(self) -> int:
        return self.num_published - self.num_taken

    @property
    def newest_sequence(self) -> int:
        return wrap(_FIRST_SEQUENCE + self.num_published - 1)

    def can_publish(self, num_jobs: int) -> bool:
        return True

    def ready_workers(self) -> tuple[int, ...]:
        self._is_dead = False
        return tuple(range(len(self.workers)))

    def submit(self, tasks: Sequence[TeamJob]) -> list[Job]:
        return [self._submit_one(task) for task in tasks]

    def _submit_one(self, task: TeamJob) -> Job:
        """Write down one more job, and what becomes of it."""
        number = self.num_published
        sequence = wrap(_FIRST_SEQUENCE + number)
        self.num_published += 1
        self.host.signal(self.published, sequence)
        members = [self.workers[worker] for worker in task.members]
        dies = 0 in task.members and number in self._dies_in
        lost = self.workers[:1] if self._is_dead else []
        if dies or any(worker in lost for worker in members):
            self._failed.add(number)
        for worker in self.workers:
            worker.process.wait(self.published, sequence)
        for worker in members:
            self._compute(worker, members, sequence, self.regions[task.arena_offset], worker not in lost)
        for worker in members:
            self.last_member.wait(worker.finished, sequence)
        self.last_member.signal(self.done, sequence)
        self._is_dead |= dies
        return Job(sequence, task.num_tokens, task.arena_offset, _X, _Y, 0, 1, 1, 1)

    def _compute(
        self, worker: _Worker, members: Sequence[_Worker], sequence: int, region: Buffer, is_alive: bool
    ) -> None:
        process = worker.process
        if is_alive:
            process.wait(self.ready, sequence)
            process.compute(reads=[self.x, region], writes=[worker.h])
        process.signal(worker.arrived, sequence)
        if is_alive:
            for other in members:
                if other is not worker:
                    process.wait(other.arrived, sequence)
            process.compute(reads=[other.h for other in members] + [region], writes=[worker.y])
        process.signal(worker.finished, sequence)

    def take_failed(self) -> tuple[int, ...]:
        numbers = range(self.num_taken, self.num_published)
        self.num_taken = self.num_published
        return tuple(wrap(_FIRST_SEQUENCE + number) for number in numbers if number in self._failed)

    def wait_done(self, sequence: int, *, timeout_s: float) -> None:
        self.host.wait(self.done, sequence)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> SymbolicTensor:
        """Of the rows."""
        return SymbolicTensor([self.x] if offset == _X else self.y, shape=shape)

    def word(self, offset: int, name: str) -> Word:
        """Of the control segment."""
        return self.done if offset == self.done_address else self.ready
