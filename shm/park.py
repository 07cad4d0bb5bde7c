"""Waiting for a word: a bounded spin, and then sleep until its writer wakes the sleeper.

A wake-up is a system call, so the writer makes it only for a sleeper that has set its flag. Sleeper
and writer each store and then load what the other one stores. A full fence between the two steps,
on both sides, excludes that both see the old value (release and acquire order alone would allow
it):

    sleeper: flag = 1; fence; is the word there? no: sleep    writer: word = n; fence; flag? wake

The kernel handles a change between the sleeper's check and its sleep (see ``futex``). A flag is for
one sleeper at a time. Words of a writer that cannot wake, such as an accelerator, are polled in
short sleeps.
"""

import time
from collections.abc import Callable

import numba

from .atomics import fence, has_reached, load_acquire, monotonic_ns, spin_until, store_release
from .errors import PeerDeadError, WaitTimeoutError
from .futex import sleep_on, wake
from .kept_code import keeps_code
from .words import wrap

_KEPT = keeps_code(__file__)

SPIN_NS = 50_000
"""How long to spin before sleeping: about as long as falling asleep and being woken takes."""

PARK_NS = 50_000_000
"""The longest uninterrupted sleep: a sleeper checks its peers this often."""

_NAP_NS = 50_000


@numba.njit("boolean(int64, int32, int64, int64)", nogil=True, cache=_KEPT)
def park_once(address: int, target: int, park_ns: int, sleeps_address: int) -> bool:
    """Sleep until a publication or for ``park_ns``; returns whether the word has been reached."""
    store_release(sleeps_address, 1)
    fence()
    seen = load_acquire(address)
    if not has_reached(seen, target):
        sleep_on(address, seen, park_ns)
    store_release(sleeps_address, 0)
    return bool(has_reached(load_acquire(address), target))


@numba.njit("boolean(int64, int32, int64)", nogil=True, cache=_KEPT)
def _nap(address: int, target: int, park_ns: int) -> bool:
    end = monotonic_ns() + park_ns
    while True:
        seen = load_acquire(address)
        if has_reached(seen, target):
            return True
        if monotonic_ns() >= end:
            return False
        sleep_on(address, seen, _NAP_NS)


@numba.njit("boolean(int64, int32, int64, int64, int64)", nogil=True, cache=_KEPT)
def wait_once(address: int, target: int, spin_ns: int, park_ns: int, sleeps_address: int) -> bool:
    """Spin up to ``spin_ns``, then sleep once, up to ``park_ns``; whether ``target`` is reached.

    It may be False early, so callers repeat it. ``sleeps_address`` is the flag that the writer of
    the word checks (``publish``), or 0 if it checks none.
    """
    if spin_until(address, target, spin_ns):
        return True
    if sleeps_address == 0:
        return bool(_nap(address, target, park_ns))
    return bool(park_once(address, target, park_ns, sleeps_address))


@numba.njit("void(int64, int32, int64)", nogil=True, cache=_KEPT)
def publish(address: int, value: int, sleeps_address: int) -> None:
    """Store ``value`` to the word with release order, and wake its sleeper if there is one."""
    store_release(address, value)
    fence()
    if load_acquire(sleeps_address) != 0:
        wake(address)


def wait_until(
    address: int,
    target: int,
    *,
    timeout_s: float,
    spin_ns: int = SPIN_NS,
    sleeps_address: int = 0,
    is_peer_alive: Callable[[], bool] | None = None,
) -> None:
    """Wait until the 4-byte word at ``address`` has reached ``target``, cyclically.

    Signals are handled, and ``is_peer_alive`` is called, every 50 ms. Raises ``PeerDeadError`` if
    it returns False and the word is not reached, and ``WaitTimeoutError`` after ``timeout_s``.
    """
    target = wrap(target)
    deadline = time.monotonic_ns() + int(timeout_s * 1e9)
    while True:
        left_ns = max(0, deadline - time.monotonic_ns())
        park_ns = max(1, min(PARK_NS, left_ns - spin_ns))
        if wait_once(address, target, min(spin_ns, left_ns), park_ns, sleeps_address):
            return
        if is_peer_alive is not None and not is_peer_alive():
            # Values stored before the death count.
            if has_reached(load_acquire(address), target):
                return
            raise PeerDeadError(f"the writer died at {load_acquire(address)}, before {target}")
        if time.monotonic_ns() >= deadline:
            raise WaitTimeoutError(
                f"the word is {load_acquire(address)}, not {target}, after {timeout_s:g} s"
            )
