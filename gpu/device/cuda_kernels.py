"""Triton kernels that store to a word and wait for one; imported only where Triton is to be used.

They take addresses as numbers, so that one compiled variant serves every word and value: a kernel
that is loaded while a wait is outstanding may hang (CUDA programming guide, lazy loading). Both
must have run once before anything waits.

A wait ends at its deadline at the latest and says so in a status word. What the polls cost the
link, and how the latency compares with a stream operation's, ``bench/gpu_check.py`` has to settle.
"""

from typing import Any

import triton
import triton.language as tl

from ...shm.words import wrap
from .cuda_runtime import Runtime

# Triton 3.9 brings an atomic load and store, and a poll that spins in one thread.
HAS_ATOMICS = hasattr(tl, "atomic_poll")
# The interpreter knows no inline assembly. It runs one program at a time, with memory in order.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)

POLL_NS = 20_000
"""How long a poll of Triton 3.9 lasts that sees another value than the one waited for.

It tests for equality, so a word that went past that value is noticed at the end of a poll.
"""
SLEEP_NS = 500
"""What older Triton sleeps between two loads of the word."""
LOAD_NS = 1_000
"""About what a load takes over the link: with it, polls are counted as time."""


@triton.jit(do_not_specialize=["word", "value"])
def signal_kernel(
    word: tl.tensor, value: tl.tensor, has_atomics: tl.constexpr, is_interpreted: tl.constexpr
) -> None:
    """Store int32 ``value`` to the word at address ``word``: a release at system scope.

    It releases what this kernel sees, which is what earlier kernels and copies of the stream have
    done: the end of one and the start of the next order them. No exchange, which would be an
    atomic operation over the link: a word has one writer.
    """
    if has_atomics:
        pointer = word.to(tl.pointer_type(tl.int32))
        tl.atomic_store(pointer, value, sem="release", scope="sys")
    elif is_interpreted:
        tl.store(word.to(tl.pointer_type(tl.int32)), value)
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.b32 $0, $2;",
            "=r,l,r",
            [word, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["word", "value", "status", "max_polls"])
def wait_kernel(
    word: tl.tensor,
    value: tl.tensor,
    status: tl.tensor,
    max_polls: tl.tensor,
    poll_ns: tl.constexpr,
    has_atomics: tl.constexpr,
    is_interpreted: tl.constexpr,
) -> None:
    """Poll the word until it has cyclically reached int32 ``value``, ``max_polls`` times at most.

    If it has not even then, store 1 to the int32 at address ``status``. To be launched with one
    warp, whose lanes see one and the same value. Later work of the stream sees what the word's
    writer wrote before: the last load is an acquire, or a fence follows it.
    """
    pointer = word.to(tl.pointer_type(tl.int32))
    num_polls = max_polls * 0
    seen = _load(pointer, has_atomics)
    while (not _is_reached(seen, value)) & (num_polls < max_polls):
        if has_atomics:
            tl.atomic_poll(pointer, value, sem="acquire", scope="sys", timeout_ns=poll_ns)
        elif not is_interpreted:
            _run_asm("nanosleep.u32 $1; mov.b32 $0, $1;", poll_ns)
        seen = _load(pointer, has_atomics)
        num_polls += 1
    if (not has_atomics) and (not is_interpreted):
        _run_asm("fence.acq_rel.sys; mov.b32 $0, $1;", 0)
    if not _is_reached(seen, value):
        tl.store(status.to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def _load(pointer: tl.tensor, has_atomics: tl.constexpr) -> tl.tensor:
    if has_atomics:
        return tl.atomic_load(pointer, sem="acquire", scope="sys")
    else:
        return tl.load(pointer, volatile=True)


@triton.jit
def _is_reached(seen: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Whether the low 32 bits of their difference are below 2^31, without overflow."""
    return ((seen.to(tl.int64) - value.to(tl.int64)) & 0xFFFFFFFF) < 0x80000000


@triton.jit
def _run_asm(code: tl.constexpr, number: tl.constexpr) -> None:
    """Run assembly with an int32 in $1; the compiler asks that it writes a result to $0."""
    argument = tl.full((), number, tl.int32)
    tl.inline_asm_elementwise(code, "=r,r", [argument], dtype=tl.int32, is_pure=False, pack=1)


class TritonKernels:
    """``Kernels`` that Triton compiles, or interprets with TRITON_INTERPRET=1."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._poll_ns = POLL_NS if HAS_ATOMICS else SLEEP_NS
        self._round_ns = self._poll_ns + LOAD_NS
        self._variant = {"has_atomics": HAS_ATOMICS, "is_interpreted": IS_INTERPRETED}

    def signal(self, stream: Any, device_address: int, value: int) -> None:
        """As ``Kernels.signal`` says."""
        signed = wrap(value)
        self._runtime.call(
            stream,
            lambda: signal_kernel[(1,)](device_address, signed, **self._variant, num_warps=1),
        )

    def wait(
        self, stream: Any, device_address: int, value: int, status: int, *, timeout_s: float
    ) -> None:
        """As ``Kernels.wait`` says."""
        signed = wrap(value)
        max_polls = min(max(1, round(timeout_s * 1e9 / self._round_ns)), 2**31 - 1)
        self._runtime.call(
            stream,
            lambda: wait_kernel[(1,)](
                device_address,
                signed,
                status,
                max_polls,
                poll_ns=self._poll_ns,
                **self._variant,
                num_warps=1,
            ),
        )
