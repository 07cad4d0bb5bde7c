"""The compiled steps of a worker's loop over its team's jobs.

``team`` is the address of the team's lines, ``own`` that of the worker's. A worker calls, in this
order and for every sequence number in turn: ``await_job``, ``await_x``, ``begin``, its kernel, with
``await_members`` between the two halves of a shared part, and ``finish``. While it waits it writes
its heartbeat, and it ends a wait as soon as the supervisor changes its state. Callable from Python
and from compiled code.

A job is done when all its members have finished it, and all jobs before it are done. The member
that sees this moves ``done`` on, so the accelerator waits for one word, however large the team is.
Two members that finish at the same time each store their word, and then read the other's, with a
full fence in between: so one of them sees both.
"""

import numba

from .atomics import (
    compare_exchange,
    fence,
    has_reached,
    load_acquire,
    load_acquire_64,
    monotonic_ns,
    pause,
    store_release,
    store_release_64,
)
from .futex import sleep_on, wake
from .kept_code import keeps_code
from .layout import JOB_BYTES, JOB_FIELDS, TEAM_BYTES, TEAM_FIELDS, WORKER_BYTES, WORKER_FIELDS, offset_in

_KEPT = keeps_code(__file__)

NOT_YET, ARRIVED, ENDED = 0, 1, 2
"""Result of a wait: time-out; available; the worker's state has changed."""
CROWDED = 4
"""Added to the result of ``await_x``: another thread had the core meanwhile."""

_PUBLISHED = offset_in(TEAM_FIELDS, "published")
_READY = offset_in(TEAM_FIELDS, "ready")
_DONE = offset_in(TEAM_FIELDS, "done")
_WAITER_SLEEPS = offset_in(TEAM_FIELDS, "waiter_sleeps")
_NAPS = offset_in(TEAM_FIELDS, "naps")
_WORKER_SLEEPS = offset_in(WORKER_FIELDS, "worker_sleeps")
_FINISHED = offset_in(WORKER_FIELDS, "finished")
_ARRIVED = offset_in(WORKER_FIELDS, "arrived")
_HEARTBEAT = offset_in(WORKER_FIELDS, "heartbeat_ns")
_STARTED = offset_in(WORKER_FIELDS, "started")
_STATE = offset_in(WORKER_FIELDS, "state")
_SEQUENCE = offset_in(JOB_FIELDS, "sequence")
_MEMBERS = offset_in(JOB_FIELDS, "members")
_STATUS = offset_in(JOB_FIELDS, "status")
_DURATION = offset_in(JOB_FIELDS, "duration_us")
_FAILED = 2  # ``JobStatus.FAILED``

_LOOKS_PER_CLOCK = 64
_NAP_NS = 50_000
_MEMBER_SPIN_NS = 50_000
_CROWDED_NS = 100_000  # between two looks at the clock, which take a few microseconds


@numba.njit("int64(int64, int64, int64, int32)", nogil=True, cache=_KEPT)
def _job_at(team: int, num_workers: int, num_slots: int, sequence: int) -> int:
    jobs = team + TEAM_BYTES + num_workers * WORKER_BYTES
    return int(jobs + (sequence & (num_slots - 1)) * JOB_BYTES)


@numba.njit("int32(int64)", nogil=True, cache=_KEPT)
def _crowded(last_ns: int) -> int:
    """Whether it is so long since the last look that another thread has had the core."""
    return CROWDED if monotonic_ns() - last_ns >= _CROWDED_NS else 0


@numba.njit("int32(int64, int64, int32, int64, int64)", nogil=True, cache=_KEPT)
def _spin(own: int, word: int, target: int, state: int, spin_ns: int) -> int:
    if has_reached(load_acquire(word), target):
        return ARRIVED
    now = monotonic_ns()
    end = now + spin_ns
    while True:
        for _ in range(_LOOKS_PER_CLOCK):
            pause()
            if has_reached(load_acquire(word), target):
                return ARRIVED + int(_crowded(now))
        crowded = int(_crowded(now))
        now = monotonic_ns()
        store_release_64(own + _HEARTBEAT, now)
        if load_acquire_64(own + _STATE) != state:
            return ENDED
        if now >= end or crowded:
            return NOT_YET + crowded


@numba.njit("void(int64, int64, int32)", nogil=True, cache=_KEPT)
def publish_jobs(team: int, num_workers: int, sequence: int) -> None:
    """Store the number of the last complete job, and wake the workers that sleep."""
    store_release(team + _PUBLISHED, sequence)
    fence()
    for worker in range(num_workers):
        if load_acquire(team + TEAM_BYTES + worker * WORKER_BYTES + _WORKER_SLEEPS) != 0:
            wake(team + _PUBLISHED)
            return


@numba.njit("void(int64, int64, int64, int32, int32)", nogil=True, cache=_KEPT)
def claim_slots(team: int, num_workers: int, num_slots: int, first: int, num_jobs: int) -> None:
    """Number the slots of jobs that are about to be written, before anything else in them changes.

    A worker that is no member of the job before may still read it: see ``holds``.
    """
    for number in range(num_jobs):
        sequence = numba.int32(first + number)
        store_release(_job_at(team, num_workers, num_slots, sequence) + _SEQUENCE, sequence)
    fence()


@numba.njit("boolean(int64, int32)", nogil=True, cache=_KEPT)
def holds(job: int, sequence: int) -> bool:
    """Whether a slot still has job ``sequence``, so that all that was read of it before is its own."""
    fence()
    return bool(load_acquire(job + _SEQUENCE) == sequence)


@numba.njit("int32(int64, int64, int32, int64, int64, int64)", nogil=True, cache=_KEPT)
def await_job(team: int, own: int, sequence: int, state: int, spin_ns: int, park_ns: int) -> int:
    """Wait until job ``sequence`` is published: spin, then sleep once until woken or ``park_ns``.

    ``state`` is the 8-byte word of the expected state.
    """
    word = team + _PUBLISHED
    found = int(_spin(own, word, sequence, state, spin_ns)) & ~CROWDED
    if found != NOT_YET:
        return found
    store_release(own + _WORKER_SLEEPS, 1)
    fence()
    seen = load_acquire(word)
    if not has_reached(seen, sequence) and load_acquire_64(own + _STATE) == state:
        sleep_on(word, seen, park_ns)
    store_release(own + _WORKER_SLEEPS, 0)
    return int(_spin(own, word, sequence, state, 0)) & ~CROWDED


@numba.njit("int32(int64, int64, int32, int64, int64)", nogil=True, cache=_KEPT)
def _nap(own: int, word: int, target: int, state: int, end_ns: int) -> int:
    """Look after each short sleep until ``end_ns``: not every writer wakes a sleeper."""
    found = int(_spin(own, word, target, state, 0)) & ~CROWDED
    while found == NOT_YET and monotonic_ns() < end_ns:
        seen = load_acquire(word)
        if not has_reached(seen, target):
            sleep_on(word, seen, _NAP_NS)
        found = int(_spin(own, word, target, state, 0)) & ~CROWDED
    return found


@numba.njit("void(int64, int32)", nogil=True, cache=_KEPT)
def _count_naps(team: int, change: int) -> None:
    """Add ``change`` to the number of workers that nap for x. A full fence."""
    seen = load_acquire(team + _NAPS)
    while not compare_exchange(team + _NAPS, seen, numba.int32(seen + change)):
        seen = load_acquire(team + _NAPS)


@numba.njit("int32(int64, int64, int32, int64, int64, int64)", nogil=True, cache=_KEPT)
def await_x(team: int, own: int, sequence: int, state: int, spin_ns: int, timeout_ns: int) -> int:
    """Wait until the x of job ``sequence`` has arrived: spin, then nap.

    The spinning ends early once it has kept another thread off the core.
    """
    end_ns = monotonic_ns() + timeout_ns
    found: int = _spin(own, team + _READY, sequence, state, min(spin_ns, timeout_ns))
    if found & ~CROWDED == NOT_YET:
        _count_naps(team, 1)
        found += int(_nap(own, team + _READY, sequence, state, end_ns))
        _count_naps(team, -1)
    return found


@numba.njit("int32(int64, int64, int64, int32, int64, int64)", nogil=True, cache=_KEPT)
def await_members(team: int, own: int, members: int, sequence: int, state: int, timeout_ns: int) -> int:
    """Tell that this worker's part of h is written, and wait for those of the other ``members``.

    The supervisor arrives for a member that dies. ``timeout_ns`` is for each member.
    """
    store_release(own + _ARRIVED, sequence)
    worker = 0
    while members != 0:
        if members & 1:
            word = team + TEAM_BYTES + worker * WORKER_BYTES + _ARRIVED
            end_ns = monotonic_ns() + timeout_ns
            found = int(_spin(own, word, sequence, state, min(_MEMBER_SPIN_NS, timeout_ns))) & ~CROWDED
            if found == NOT_YET:
                found = int(_nap(own, word, sequence, state, end_ns))
            if found != ARRIVED:
                return found
        members >>= 1
        worker += 1
    return ARRIVED


@numba.njit("int64(int64, int32)", nogil=True, cache=_KEPT)
def begin(own: int, sequence: int) -> int:
    """Record that the computation of job ``sequence`` begins: its deadline counts from here.

    Returns the time, for ``finish``.
    """
    now = monotonic_ns()
    store_release_64(own + _HEARTBEAT, now)
    store_release(own + _STARTED, sequence)
    return int(now)


@numba.njit("void(int64, int32)", nogil=True, cache=_KEPT)
def skip(own: int, sequence: int) -> None:
    """Leave job ``sequence``, of which this worker is no member, to others."""
    store_release(own + _ARRIVED, sequence)  # a word 2^31 jobs behind would look reached
    store_release(own + _FINISHED, sequence)


@numba.njit("boolean(int64, int64, int64, int32)", nogil=True, cache=_KEPT)
def _is_finished(team: int, num_workers: int, job: int, sequence: int) -> bool:
    members = load_acquire_64(job + _MEMBERS)
    for worker in range(num_workers):
        word = team + TEAM_BYTES + worker * WORKER_BYTES + _FINISHED
        if (members >> worker) & 1 and not has_reached(load_acquire(word), sequence):
            return False
    return True


@numba.njit("void(int64, int64, int64)", nogil=True, cache=_KEPT)
def _move_done(team: int, num_workers: int, num_slots: int) -> None:
    """Move ``done`` on over all jobs that are finished, and wake its sleeper.

    A job that is read here may have been replaced meanwhile; then ``done`` has changed, too.
    """
    has_moved = False
    fence()
    while True:
        done = load_acquire(team + _DONE)
        sequence = numba.int32(done + 1)
        if has_reached(done, load_acquire(team + _PUBLISHED)):
            break
        if not _is_finished(team, num_workers, _job_at(team, num_workers, num_slots, sequence), sequence):
            break
        has_moved |= compare_exchange(team + _DONE, done, sequence)
    if has_moved and load_acquire(team + _WAITER_SLEEPS) != 0:
        wake(team + _DONE)


@numba.njit("void(int64, int64, int64, int64, int32, int32, int64)", nogil=True, cache=_KEPT)
def finish(
    team: int, num_workers: int, num_slots: int, own: int, sequence: int, status: int, began_ns: int
) -> None:
    """Finish job ``sequence`` as one of its members, and move ``done`` on.

    y, written by the caller before, is visible to a reader of ``done``. ``status`` is a plain
    int: from Python, an enum costs ten microseconds here.
    """
    job = _job_at(team, num_workers, num_slots, sequence)
    store_release(job + _DURATION, min((monotonic_ns() - began_ns) // 1000, 2**31 - 1))
    if status == _FAILED:
        store_release(job + _STATUS, _FAILED)
    store_release(own + _ARRIVED, sequence)  # of a part that failed, or that is not shared
    store_release(own + _FINISHED, sequence)
    _move_done(team, num_workers, num_slots)


@numba.njit("int64(int64, int64, int64, int64)", nogil=True, cache=_KEPT)
def finish_for_dead(team: int, num_workers: int, num_slots: int, worker: int) -> int:
    """Fail all jobs that a worker was to compute, and arrive for it; returns how many were failed.

    A slot that has a later job by now belonged to none of them.
    """
    own = team + TEAM_BYTES + worker * WORKER_BYTES
    published = load_acquire(team + _PUBLISHED)
    left = min(int(numba.int32(published - load_acquire(own + _FINISHED))), num_slots)
    num_failed = 0
    for behind in range(left - 1, -1, -1):
        sequence = numba.int32(published - behind)
        job = _job_at(team, num_workers, num_slots, sequence)
        if (load_acquire_64(job + _MEMBERS) >> worker) & 1 and holds(job, sequence):
            num_failed += load_acquire(job + _STATUS) != _FAILED
            store_release(job + _STATUS, _FAILED)
    store_release(own + _ARRIVED, published)
    store_release(own + _FINISHED, published)
    _move_done(team, num_workers, num_slots)
    return num_failed
