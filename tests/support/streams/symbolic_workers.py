"""CPU workers as processes of a symbolic program, behind what ``WorkerGateway`` asks of a pool."""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from corun.cpu_workers.slices import SliceJob
from corun.gpu.device.base import Word
from corun.shm.job import Job
from corun.shm.words import wrap
from support.streams.symbolic import SymbolicDevice
from support.streams.symbolic_program import Buffer
from support.streams.symbolic_tape import Process
from support.streams.symbolic_tensors import SymbolicTensor

_FIRST_SEQUENCE = 2**31 - 2  # wraps around on the way
_Y_OFFSET = 100


class SymbolicWorker:
    """One worker, its mailbox and its rings. After its death, the same agent answers for it."""

    def __init__(self, device: SymbolicDevice, index: int, num_slots: int) -> None:
        before = _FIRST_SEQUENCE - 1
        self.process: Process = device.process(f"worker {index}")
        self.published = device.word(f"published {index}", initial=before)
        self.ready = device.word(f"ready {index}", initial=before)
        self.done = device.word(f"done {index}", initial=before)
        self.x = [Buffer(f"x {index}.{slot}") for slot in range(num_slots)]
        self.y = [Buffer(f"y {index}.{slot}") for slot in range(num_slots)]
        device.host.compute(writes=[*self.x, *self.y])  # zeros
        self.ready_address, self.done_address = 2 * index, 2 * index + 1
        self.num_published = self.num_taken = 0
        self.failed: set[int] = set()  # jobs, by number
        self.host = device.host

    @property
    def num_outstanding(self) -> int:
        return self.num_published - self.num_taken

    @property
    def newest_sequence(self) -> int:
        return wrap(_FIRST_SEQUENCE + self.num_published - 1)

    def can_publish(self, num_jobs: int) -> bool:
        return True

    def publish(self, region: Buffer, *, is_alive: bool, dies: bool) -> int:
        """Write down one more job, and what becomes of it; return its number."""
        number, worker = self.num_published, self.process
        sequence = wrap(_FIRST_SEQUENCE + number)
        slot = number % len(self.x)
        self.num_published += 1
        self.host.signal(self.published, sequence)
        worker.wait(self.published, sequence)
        if is_alive:
            worker.wait(self.ready, sequence)
            worker.compute(reads=[self.x[slot], region], writes=[self.y[slot]])
        if dies or not is_alive:  # the supervisor has reaped it
            self.failed.add(number)
        worker.signal(self.done, sequence)
        return number

    def take_failed(self) -> tuple[int, ...]:
        numbers = range(self.num_taken, self.num_published)
        self.num_taken = self.num_published
        return tuple(wrap(_FIRST_SEQUENCE + number) for number in numbers if number in self.failed)


class SymbolicPool:
    """What ``WorkerGateway`` knows of a pool, its rings and its control segment.

    ``dies_in``: jobs of worker 0, by number, in which it dies; it is replaced for the next pass.
    """

    def __init__(
        self, device: SymbolicDevice, num_workers: int, num_slots: int, dies_in: Collection[int]
    ) -> None:
        self.device = device
        self.config = SimpleNamespace(num_ring_slots=num_slots, num_job_slots=64)
        self.num_workers = num_workers
        self.workers = [SymbolicWorker(device, index, num_slots) for index in range(num_workers)]
        self.regions: dict[int, Buffer] = {}  # of the arena, by offset
        self.address = 0  # of the control segment
        self._dies_in = dies_in
        self._is_dead = False

    def ready_workers(self) -> tuple[int, ...]:
        self._is_dead = False
        return tuple(range(self.num_workers))

    def end(self, worker: int) -> SymbolicWorker:
        return self.workers[worker]

    def submit(self, worker: int, tasks: Sequence[SliceJob]) -> list[Job]:
        return [self._submit_one(worker, task) for task in tasks]

    def _submit_one(self, worker: int, task: SliceJob) -> Job:
        box = self.workers[worker]
        dies = worker == 0 and box.num_published in self._dies_in
        is_alive = worker != 0 or not self._is_dead
        number = box.publish(self.regions[task.arena_offset], is_alive=is_alive, dies=dies)
        self._is_dead |= dies
        slot = 1000 * worker + number % len(box.x)
        return Job(
            wrap(_FIRST_SEQUENCE + number),
            1,
            task.arena_offset,
            slot,
            slot + _Y_OFFSET,
            task.num_tokens,
            1,
            1,
            1,
        )

    def wait_done(self, worker: int, sequence: int, *, timeout_s: float) -> None:
        self.device.host.wait(self.workers[worker].done, sequence)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> SymbolicTensor:
        box, place = self.workers[offset // 1000], offset % 1000
        slot = box.y[place - _Y_OFFSET] if place >= _Y_OFFSET else box.x[place]
        return SymbolicTensor([slot], shape=shape)

    def word(self, offset: int, name: str) -> Word:
        box = self.workers[offset // 2]
        return box.done if offset % 2 else box.ready
