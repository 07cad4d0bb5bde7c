"""The compiled steps of a worker's loop over one mailbox; all take the mailbox's address.

A worker calls, in this order and for every sequence number in turn: ``await_job``, ``await_x``,
``begin``, its kernel, ``complete``. While it waits it writes its heartbeat, and it ends a wait as
soon as the supervisor changes its state. Callable from Python and from compiled code.
"""

import numba

from .atomics import (
    fence,
    has_reached,
    load_acquire,
    load_acquire_64,
    monotonic_ns,
    pause,
    store_release,
    store_release_64,
)
from .futex import sleep_on
from .kept_code import keeps_code
from .layout import JOB_BYTES, JOBS_OFFSET, RESULT_BYTES, RESULT_FIELDS, offset_of
from .park import publish

_KEPT = keeps_code(__file__)

NOT_YET, ARRIVED, ENDED = 0, 1, 2
"""Result of a wait: time-out; available; the worker's state has changed."""

_PUBLISHED = offset_of("published")
_WORKER_SLEEPS = offset_of("worker_sleeps")
_READY = offset_of("ready")
_DONE = offset_of("done")
_WAITER_SLEEPS = offset_of("waiter_sleeps")
_HEARTBEAT = offset_of("heartbeat_ns")
_STARTED = offset_of("started")
_STATE = offset_of("state")
_SEQUENCE, _GENERATION, _STATUS, _DURATION = (field.offset for field in RESULT_FIELDS)

_LOOKS_PER_CLOCK = 64
_NAP_NS = 50_000


@numba.njit("int32(int64, int64, int32, int64, int64)", nogil=True, cache=_KEPT)
def _spin(mailbox: int, word: int, target: int, state: int, spin_ns: int) -> int:
    if has_reached(load_acquire(word), target):
        return ARRIVED
    end = monotonic_ns() + spin_ns
    while True:
        for _ in range(_LOOKS_PER_CLOCK):
            pause()
            if has_reached(load_acquire(word), target):
                return ARRIVED
        now = monotonic_ns()
        store_release_64(mailbox + _HEARTBEAT, now)
        if load_acquire_64(mailbox + _STATE) != state:
            return ENDED
        if now >= end:
            return NOT_YET


@numba.njit("int32(int64, int32, int64, int64, int64)", nogil=True, cache=_KEPT)
def await_job(mailbox: int, sequence: int, state: int, spin_ns: int, park_ns: int) -> int:
    """Wait until job ``sequence`` is published: spin, then sleep once until woken or ``park_ns``.

    ``state`` is the 8-byte word of the expected state.
    """
    word = mailbox + _PUBLISHED
    found: int = _spin(mailbox, word, sequence, state, spin_ns)
    if found != NOT_YET:
        return found
    store_release(mailbox + _WORKER_SLEEPS, 1)
    fence()
    seen = load_acquire(word)
    if not has_reached(seen, sequence) and load_acquire_64(mailbox + _STATE) == state:
        sleep_on(word, seen, park_ns)
    store_release(mailbox + _WORKER_SLEEPS, 0)
    return int(_spin(mailbox, word, sequence, state, 0))


@numba.njit("int32(int64, int32, int64, int64, int64)", nogil=True, cache=_KEPT)
def await_x(mailbox: int, sequence: int, state: int, spin_ns: int, timeout_ns: int) -> int:
    """Wait until the x of job ``sequence`` has arrived: spin, then poll every 50 microseconds.

    An accelerator cannot wake a sleeper, so there is no sleep until woken.
    """
    word = mailbox + _READY
    end = monotonic_ns() + timeout_ns
    found: int = _spin(mailbox, word, sequence, state, min(spin_ns, timeout_ns))
    while found == NOT_YET and monotonic_ns() < end:
        sleep_on(word, load_acquire(word), _NAP_NS)
        found = _spin(mailbox, word, sequence, state, 0)
    return found


@numba.njit("void(int64, int32)", nogil=True, cache=_KEPT)
def begin(mailbox: int, sequence: int) -> None:
    """Record that the computation of job ``sequence`` begins: its deadline counts from here."""
    store_release_64(mailbox + _HEARTBEAT, monotonic_ns())
    store_release(mailbox + _STARTED, sequence)


@numba.njit("void(int64, int32, int32, int32, int32, int32)", nogil=True, cache=_KEPT)
def complete(
    mailbox: int, num_slots: int, sequence: int, generation: int, status: int, duration_us: int
) -> None:
    """Write the result of job ``sequence``, then release its waiters.

    y, written by the caller before, is visible to a reader of ``done``. ``status`` is a plain
    int: from Python, an enum costs ten microseconds here.
    """
    slot = sequence & (num_slots - 1)
    result = mailbox + JOBS_OFFSET + num_slots * JOB_BYTES + slot * RESULT_BYTES
    store_release(result + _SEQUENCE, sequence)
    store_release(result + _GENERATION, generation)
    store_release(result + _STATUS, status)
    store_release(result + _DURATION, duration_us)
    publish(mailbox + _DONE, sequence, mailbox + _WAITER_SLEEPS)
