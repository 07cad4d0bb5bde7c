"""What is said in a mailbox: jobs, results, and the state of a worker."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Self

from .layout import JOB_BYTES, JOB_FIELDS, RESULT_BYTES, RESULT_FIELDS, structure
from .words import wrap

_JOB = structure(JOB_FIELDS, JOB_BYTES)
_RESULT = structure(RESULT_FIELDS, RESULT_BYTES)


class Job(NamedTuple):
    """A slice of tokens of one (layer, input group) of one adapter. The fields of ``JOB_FIELDS``.

    x is bf16 [num_tokens, in features] and y bf16 [num_tokens, padded out columns of all targets],
    in rows of the strides given. A tuple, because a pass makes one per layer and input group.
    """

    sequence: int  # int32, the one after the last job's
    generation: int  # the worker that it is meant for
    arena_offset: int
    x_offset: int
    y_offset: int
    num_tokens: int
    x_stride_bytes: int
    y_stride_bytes: int
    predicted_us: int
    slowdown_permille: int = 1000  # takes so many thousandths of its time, on purpose

    def write(self, buffer: memoryview, offset: int) -> None:
        """Encode to 64 bytes."""
        _JOB.pack_into(buffer, offset, *self)

    @classmethod
    def read(cls, buffer: memoryview, offset: int) -> Self:
        """Decode."""
        return cls(*_JOB.unpack_from(buffer, offset))


class JobStatus(IntEnum):
    """How a job ended."""

    DONE = 1
    FAILED = 2


class Result(NamedTuple):
    """How a job ended; ``duration_us`` is 0 for a job that was not computed."""

    sequence: int
    generation: int
    status: JobStatus
    duration_us: int

    def write(self, buffer: memoryview, offset: int) -> None:
        """Encode to 16 bytes."""
        _RESULT.pack_into(buffer, offset, *self)

    @classmethod
    def read(cls, buffer: memoryview, offset: int) -> Self:
        """Decode. Raises ``ValueError`` for a status that is none."""
        sequence, generation, status, duration_us = _RESULT.unpack_from(buffer, offset)
        return cls(sequence, generation, JobStatus(status), duration_us)


class WorkerStatus(IntEnum):
    """What the supervisor says of a worker."""

    ABSENT = 0  # none has been started
    STARTING = 1  # it may look, but does not write but its heartbeat
    RUNNING = 2  # the only one in which jobs are meant for it
    STOPPING = 3  # it ends after the job that it computes
    DEAD = 4  # reaped, so it writes no more


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One 8-byte word, so that nobody sees the status of one worker with the number of another."""

    generation: int  # counts the workers that were started here; wraps around as an int32
    status: WorkerStatus

    def to_word(self) -> int:
        """The int64 that stands for it."""
        return wrap(self.generation) * 2**32 + self.status

    @classmethod
    def from_word(cls, word: int) -> Self:
        """Decode."""
        return cls(word >> 32, WorkerStatus(word & 0xFFFFFFFF))
