"""The contents of the control segment: jobs, and the state of a worker."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Self

from .layout import JOB_BYTES, JOB_FIELDS, structure
from .words import wrap

_JOB = structure(JOB_FIELDS, JOB_BYTES)


class JobStatus(IntEnum):
    """How a job ended."""

    DONE = 1
    FAILED = 2


class Job(NamedTuple):
    """The rows of one (layer, input group) of one adapter, for a team. The fields of ``JOB_FIELDS``.

    x is bf16 [num_tokens, in features], y bf16 [num_tokens, padded out columns of all targets] and
    h, which members share, float32 [num_tokens, padded ranks of all targets]; each contiguous. A
    tuple, because a pass makes one per layer and input group.
    """

    sequence: int  # int32, the one after the last job's
    num_tokens: int
    arena_offset: int
    x_offset: int
    y_offset: int
    h_offset: int
    members: int  # bit n: worker n computes a part
    token_parts: int
    predicted_us: int
    slowdown_permille: int = 1000  # deliberate slowdown: thousandths of the normal time
    is_crowded: int = 0  # 1: members nap at once while they wait for x
    status: int = JobStatus.DONE  # once it is done
    duration_us: int = 0  # of the last member; 0 if it was not computed

    def write(self, buffer: memoryview, offset: int) -> None:
        """Encode to ``JOB_BYTES``."""
        _JOB.pack_into(buffer, offset, *self)

    @classmethod
    def read(cls, buffer: memoryview, offset: int) -> Self:
        """Decode."""
        return cls._make(_JOB.unpack_from(buffer, offset))


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
