"""Waits of the CPU device's threads for words: compiled, without the GIL, in two stages.

A wait first polls, and yields the core between polls. The awaited store is often microseconds away,
and waking a sleeping thread costs tens of them. It yields because the storing thread, or a
computation, may share its core; spinning would delay the very store that is awaited. Then the wait
sleeps for a share of the time waited so far: a long wait costs little and still ends with a small
relative delay.
"""

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...shm.atomics import has_reached, load_acquire, monotonic_ns, pause
from ...shm.kept_code import keeps_code

_KEPT = keeps_code(__file__)

_BYTES = ir.IntType(8).as_pointer()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

_YIELD_NS = 10_000_000
_PAUSES_PER_LOOK = 16
_LOOKS_PER_SLEEP = 32  # sleeps for 1/32 of the time waited so far
_MAX_SLEEP_NS = 1_000_000
_LONGEST_LATE_NS = 150_000  # usual upper bound of a sleep's overrun
_BRIEFLY_NS = 50_000
_SHORT_NS = 1_000_000  # longer waits for the end of a copy may end late by a sleep's overrun


def _libc(builder: ir.IRBuilder, name: str, kinds: list[ir.Type]) -> ir.Value:
    module = builder.module
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(_I32, kinds), name)


@intrinsic
def _yield_core(typing_context: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.call(_libc(builder, "sched_yield", []), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _sleep_ns(typing_context: Any, duration_ns: Any) -> Any:
    """Sleep for less than a second; a signal may end it early."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        timespec = ir.ArrayType(_I64, 2)
        pointer = timespec.as_pointer()
        # In the entry block: inside a loop it would take more of the stack in every iteration.
        slot = cgutils.alloca_once(builder, timespec)
        value = builder.insert_value(ir.Constant(timespec, [0, 0]), args[0], 1)
        builder.store(value, slot)
        function = _libc(builder, "nanosleep", [pointer, pointer])
        builder.call(function, [slot, ir.Constant(pointer, None)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _copy_bytes(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        pointers = (builder.inttoptr(address, _BYTES) for address in args[:2])
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@numba.njit("boolean(int64, int32, int64, int64)", nogil=True, cache=_KEPT)
def wait_word(address: int, target: int, waited_ns: int, timeout_ns: int) -> bool:
    """Wait until the word at ``address`` has reached ``target``; False after ``timeout_ns``.

    ``waited_ns`` of them have passed in earlier calls, which this call continues.
    """
    if has_reached(load_acquire(address), target):
        return True
    start_ns = monotonic_ns() - waited_ns
    while True:
        for _ in range(_PAUSES_PER_LOOK):
            pause()
            if has_reached(load_acquire(address), target):
                return True
        waited_ns = monotonic_ns() - start_ns
        if waited_ns >= timeout_ns:
            return False
        if waited_ns >= _YIELD_NS:
            _sleep_ns(min(waited_ns // _LOOKS_PER_SLEEP, _MAX_SLEEP_NS, timeout_ns - waited_ns))
        else:
            _yield_core()


@numba.njit("void(int64)", nogil=True, cache=_KEPT)
def wait_clock(deadline_ns: int) -> None:
    """Wait until the monotonic clock reaches ``deadline_ns``, within a few microseconds."""
    while True:
        left_ns = deadline_ns - monotonic_ns()
        if left_ns <= 0:
            return
        if left_ns > _LONGEST_LATE_NS:
            _sleep_ns(min(left_ns - _LONGEST_LATE_NS, 500_000_000))
        else:
            _yield_core()


@numba.njit("void(int64, int64, int64, int64)", nogil=True, cache=_KEPT)
def copy_until(target: int, source: int, num_bytes: int, deadline_ns: int) -> None:
    """Copy memory that does not overlap, and return at the deadline.

    A long wait only sleeps, and may end a little late: a thread that has yielded gets its core last,
    perhaps while it holds the interpreter's lock.
    """
    _copy_bytes(target, source, num_bytes)
    left_ns = deadline_ns - monotonic_ns()
    while left_ns > _SHORT_NS:
        _sleep_ns(min(left_ns, 500_000_000))
        left_ns = deadline_ns - monotonic_ns()
    wait_clock(deadline_ns)


@numba.njit("boolean(int64, int32)", nogil=True, cache=_KEPT)
def wait_briefly(address: int, target: int) -> bool:
    """The start of ``wait_word``, before a wait on a lock that is not urgent."""
    return bool(wait_word(address, target, 0, _BRIEFLY_NS))


@numba.njit("boolean(int64, int32)", nogil=True, cache=_KEPT)
def wait_awake(address: int, target: int) -> bool:
    """All of ``wait_word`` but the sleeps, before a wait on a lock."""
    return bool(wait_word(address, target, 0, _YIELD_NS))
