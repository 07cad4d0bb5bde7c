"""The contents of a mailbox: jobs, results, and the state of a worker."""

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
    generation: int  # of the worker that it is for
    arena_offset: int
    x_offset: int
    y_offset: int
    num_tokens: int
    x_stride_bytes: int
    y_stride_bytes: int
    predicted_us: int
    slowdown_permille: int = 1000  # deliberate slowdown: thousandths of the normal time

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
        """Decode. Raises ``ValueError`` for an unknown status."""
        sequence, generation, status, duration_us = _RESULT.unpack_from(buffer, offset)
        return cls(sequence, generation, JobStatus(status), duration_us)


class WorkerStatus(IntEnum):
    """The supervisor's status of a worker."""

    ABSENT = 0  # not started
    STARTING = 1  # may read, and writes only its heartbeat
    RUNNING = 2  # the only state in which it gets jobs
    STOPPING = 3  # ends after the current job
    DEAD = 4  # reaped, so it no longer writes


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One 8-byte word, so that status and generation are always read together."""

    generation: int  # counts the workers started here; wraps around as an int32
    status: WorkerStatus

    def to_word(self) -> int:
        """The int64 that encodes it."""
        return wrap(self.generation) * 2**32 + self.status

    @classmethod
    def from_word(cls, word: int) -> Self:
        """Decode."""
        return cls(word >> 32, WorkerStatus(word & 0xFFFFFFFF))
