"""The control segment: the team's words, the words of each worker, and the jobs."""

from dataclasses import dataclass
from typing import Self

from .backing import Backing
from .errors import FormatError, ShmError
from .layout import (
    CONTROL_FIELDS,
    JOB_BYTES,
    LINE_BYTES,
    TEAM_BYTES,
    TEAM_FIELDS,
    WORKER_BYTES,
    WORKER_FIELDS,
    jobs_offset,
    offset_in,
    structure,
)
from .segment import Segment
from .words import wrap

CONTROL_KIND = "control"
MAX_WORKERS = 63  # bits of ``Job.members``

_GEOMETRY = structure(CONTROL_FIELDS, LINE_BYTES)
_TEAM_NAMES = {field.name for field in TEAM_FIELDS}


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The team's mailbox as one worker sees it: addresses in this process.

    ``buffer`` is the mailbox itself; it stays mapped while referenced. Addresses are fields, not
    properties, as an invocation reads them often.
    """

    worker: int
    num_workers: int
    num_slots: int
    team: int  # address of the team's lines
    own: int  # address of the worker's lines
    jobs: int  # offset of the jobs from the team's lines
    buffer: memoryview

    def word(self, name: str) -> int:
        """The address of a field of ``TEAM_FIELDS``, or of the worker's ``WORKER_FIELDS``."""
        if name in _TEAM_NAMES:
            return self.team + offset_in(TEAM_FIELDS, name)
        return self.own + offset_in(WORKER_FIELDS, name)

    def job_offset(self, sequence: int) -> int:
        return self.jobs + sequence % self.num_slots * JOB_BYTES


class Control:
    """The control segment, created here or attached by descriptor."""

    def __init__(self, segment: Segment, num_workers: int, num_slots: int) -> None:
        self.segment = segment
        self.num_workers = num_workers
        self.num_slots = num_slots

    @classmethod
    def create(
        cls, *, num_workers: int, num_slots: int = 256, first_sequence: int = 1, backing: Backing = "auto"
    ) -> Self:
        """Make an empty mailbox of ``num_slots`` jobs; all workers are absent.

        ``num_slots`` is a power of two, so that slots stay consecutive where sequence numbers
        wrap around. Raises ``ShmError`` and its subclasses.
        """
        _check_shape(num_workers, num_slots)
        num_bytes = LINE_BYTES + _mailbox_bytes(num_workers, num_slots)
        segment = Segment.create(num_bytes, kind=CONTROL_KIND, backing=backing)
        _GEOMETRY.pack_into(segment.buffer, 0, num_workers, num_slots)
        control = cls(segment, num_workers, num_slots)
        before_first = wrap(first_sequence - 1).to_bytes(4, "little", signed=True)
        for worker in range(num_workers):
            box = control.mailbox(worker)
            for name in ("published", "ready", "done", "finished", "arrived", "started"):
                start = box.word(name) - box.team
                box.buffer[start : start + 4] = before_first
        return control

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map the control segment behind a descriptor. Raises ``FormatError``."""
        segment = Segment.attach(fd, kind=CONTROL_KIND)
        shape = _GEOMETRY.unpack_from(segment.buffer, 0)
        try:
            _check_shape(*shape)
            if segment.num_bytes != LINE_BYTES + _mailbox_bytes(*shape):
                raise ShmError(f"{segment.num_bytes} bytes")
        except ShmError as error:
            segment.close()
            raise FormatError(f"the control segment does not fit its shape {shape}") from error
        return cls(segment, *shape)

    @property
    def fd(self) -> int:
        """The descriptor, for other processes."""
        return self.segment.fd

    def mailbox(self, worker: int) -> Mailbox:
        assert 0 <= worker < self.num_workers, worker
        team = self.segment.address + LINE_BYTES
        own = team + TEAM_BYTES + worker * WORKER_BYTES
        jobs, buffer = jobs_offset(self.num_workers), self.segment.buffer[LINE_BYTES:]
        return Mailbox(worker, self.num_workers, self.num_slots, team, own, jobs, buffer)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last referenced mailbox."""
        self.segment.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mailbox_bytes(num_workers: int, num_slots: int) -> int:
    return jobs_offset(num_workers) + num_slots * JOB_BYTES


def _check_shape(num_workers: int, num_slots: int) -> None:
    if not 1 <= num_workers <= MAX_WORKERS:
        raise ShmError(f"a team of {num_workers} workers is not possible: it has 1 to {MAX_WORKERS}")
    if num_slots < 2 or num_slots & (num_slots - 1) or num_slots > 2**20:
        raise ShmError(f"a mailbox of {num_slots} slots: it must be a power of two, 2 to 2^20")
