"""The control segment: the mailboxes of all workers."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .backing import Backing
from .errors import FormatError, ShmError
from .layout import (
    CONTROL_FIELDS,
    JOB_BYTES,
    JOBS_OFFSET,
    LINE_BYTES,
    RESULT_BYTES,
    mailbox_bytes,
    offset_of,
    results_offset,
    structure,
)
from .segment import Segment
from .words import wrap

CONTROL_KIND = "control"

_GEOMETRY = structure(CONTROL_FIELDS, LINE_BYTES)


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The mailbox of the producer and one worker: addresses in this process.

    ``buffer`` is the mailbox itself; it stays mapped while referenced.
    """

    worker: int
    num_slots: int
    address: int
    buffer: memoryview

    def word(self, name: str) -> int:
        """The address of a field of ``MAILBOX_FIELDS``."""
        return self.address + offset_of(name)

    def job_offset(self, sequence: int) -> int:
        """The offset of the job's descriptor from the mailbox's start."""
        return JOBS_OFFSET + sequence % self.num_slots * JOB_BYTES

    def result_offset(self, sequence: int) -> int:
        """The offset of the job's result from the mailbox's start."""
        return results_offset(self.num_slots) + sequence % self.num_slots * RESULT_BYTES


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
        """Make empty mailboxes of ``num_slots`` jobs each; all workers are absent.

        ``num_slots`` is a power of two, so that slots stay consecutive where sequence numbers
        wrap around. Raises ``ShmError`` and its subclasses.
        """
        _check_shape(num_workers, num_slots)
        num_bytes = LINE_BYTES + num_workers * mailbox_bytes(num_slots)
        segment = Segment.create(num_bytes, kind=CONTROL_KIND, backing=backing)
        _GEOMETRY.pack_into(segment.buffer, 0, num_workers, num_slots)
        control = cls(segment, num_workers, num_slots)
        before_first = wrap(first_sequence - 1).to_bytes(4, "little", signed=True)
        for worker in range(num_workers):
            buffer = control.mailbox(worker).buffer
            for name in ("published", "ready", "done", "started"):
                buffer[offset_of(name) : offset_of(name) + 4] = before_first
        return control

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map the control segment behind a descriptor. Raises ``FormatError``."""
        segment = Segment.attach(fd, kind=CONTROL_KIND)
        shape = _GEOMETRY.unpack_from(segment.buffer, 0)
        try:
            _check_shape(*shape)
            if segment.num_bytes != LINE_BYTES + shape[0] * mailbox_bytes(shape[1]):
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
        """The mailbox of a worker."""
        assert 0 <= worker < self.num_workers, worker
        size = mailbox_bytes(self.num_slots)
        start = LINE_BYTES + worker * size
        address = self.segment.address + start
        return Mailbox(worker, self.num_slots, address, self.segment.buffer[start : start + size])

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last referenced mailbox."""
        self.segment.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_shape(num_workers: int, num_slots: int) -> None:
    if num_workers < 1:
        raise ShmError(f"{num_workers} workers are not possible: there must be at least one")
    if num_slots < 2 or num_slots & (num_slots - 1) or num_slots > 2**20:
        raise ShmError(f"a mailbox of {num_slots} slots: it must be a power of two, 2 to 2^20")
