"""The control segment: its shape, its addresses, and refusals of attach."""

import os

import pytest
from corun.shm.atomics import load_acquire
from corun.shm.control import Control
from corun.shm.errors import FormatError, ShmError
from corun.shm.job import WorkerState, WorkerStatus
from corun.shm.layout import JOB_BYTES, LINE_BYTES, TEAM_BYTES, TEAM_FIELDS, WORKER_BYTES, WORKER_FIELDS
from corun.shm.mailbox import ProducerEnd
from corun.shm.segment import Segment
from corun.shm.words import wrap


def test_a_team_shares_its_words_and_jobs_and_workers_have_their_own() -> None:
    with Control.create(num_workers=3, num_slots=4) as control:
        boxes = [control.mailbox(worker) for worker in range(3)]
        assert {box.team - control.segment.address for box in boxes} == {LINE_BYTES}
        starts = [box.own - box.team for box in boxes]
        assert starts == [TEAM_BYTES + index * WORKER_BYTES for index in range(3)]
        slots = {box.job_offset(n) for box in boxes for n in range(2**31 - 3, 2**31 + 3)}
        first = TEAM_BYTES + 3 * WORKER_BYTES
        assert slots == {first + slot * JOB_BYTES for slot in range(4)}
        assert boxes[0].team + first + 4 * JOB_BYTES == control.segment.address + control.segment.num_bytes
        assert boxes[0].job_offset(2**31) == boxes[0].job_offset(wrap(2**31))


@pytest.mark.parametrize("first", [1, 0, 2**31 - 1, 2**31, 2**32 - 1])
def test_all_words_start_before_the_first_job(first: int) -> None:
    with (
        Control.create(num_workers=1, num_slots=2, first_sequence=first) as control,
        Control.attach(control.fd) as other,
    ):
        box = other.mailbox(0)
        for name in ("published", "ready", "done", "finished", "arrived", "started"):
            assert load_acquire(box.word(name)) == wrap(first - 1)
        end = ProducerEnd(other)
        assert end.next_sequence == wrap(first)
        assert end.state(0) == WorkerState(0, WorkerStatus.ABSENT)
        assert (other.num_workers, other.num_slots) == (1, 2)


@pytest.mark.parametrize(("num_workers", "num_slots"), [(0, 4), (64, 4), (1, 1), (1, 12), (1, 2**21)])
def test_shapes_that_cannot_be_are_refused(num_workers: int, num_slots: int) -> None:
    with pytest.raises(ShmError):
        Control.create(num_workers=num_workers, num_slots=num_slots)


def test_attach_refuses_other_segments() -> None:
    with Segment.create(4096, kind="control") as segment:
        with pytest.raises(FormatError, match="does not fit its shape"):
            Control.attach(segment.fd)
        segment.buffer[:8] = b"".join(n.to_bytes(4, "little") for n in (9, 64))
        with pytest.raises(FormatError, match="does not fit its shape"):
            Control.attach(segment.fd)
    with Segment.create(4096, kind="rings") as segment, pytest.raises(FormatError, match="rings"):
        Control.attach(segment.fd)


def test_a_held_mailbox_stays_mapped() -> None:
    control = Control.create(num_workers=1)
    end = ProducerEnd(control)
    fd = control.fd
    control.close()
    control.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ShmError, match="closed"):
        control.mailbox(0)
    assert end.can_publish() and not end.is_done(end.next_sequence)


@pytest.mark.parametrize("status", list(WorkerStatus))
@pytest.mark.parametrize("generation", [0, 1, 2**31 - 1, -(2**31), -1])
def test_a_state_is_one_word(status: WorkerStatus, generation: int) -> None:
    state = WorkerState(generation, status)
    assert WorkerState.from_word(state.to_word()) == state
    assert -(2**63) <= state.to_word() < 2**63


def test_words_have_addresses_by_name() -> None:
    with Control.create(num_workers=1) as control:
        box = control.mailbox(0)
        for table, start in ((TEAM_FIELDS, box.team), (WORKER_FIELDS, box.own)):
            assert [box.word(field.name) - start for field in table] == [field.offset for field in table]
