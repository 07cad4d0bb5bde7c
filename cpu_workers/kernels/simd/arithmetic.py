"""The arithmetic of a process's kernels, and its speed in registers."""

import time
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .compiled import kernel
from .emitter import BF16X32, F32, I32, I64, Emitter
from .integers import Integers
from .intrinsics import emits
from .isa import has_matrix_registers, is_forced, process_isa
from .layout import BFLOAT16, BFLOAT16_DOT, BFLOAT16_TILES, CODED

NUM_SUMS = 12  # fit 16 registers, and hide a latency of 5 cycles at two products a cycle
_UNROLLED = 4
_MEASURED_LOOPS = 10_000
_MEASURED_ROUNDS = 3


@cache
def bfloat16_tag() -> np.generic:
    """The format tag of this process's kernels: pairs if these are faster than float32.

    An instruction for pairs computes twice as many products as one for float32, but some processors
    take four times as long for it (AVX512_BF16 of Intel processors with matrix instructions). So
    the rates of both are measured, for some milliseconds, unless the level is forced.
    """
    if not process_isa().has_bfloat16_dot:
        return BFLOAT16
    if is_forced():
        return BFLOAT16_DOT
    rates = {tag.dtype: products_per_s(tag) for tag in (BFLOAT16_DOT, BFLOAT16)}
    is_faster = rates[BFLOAT16_DOT.dtype] > rates[BFLOAT16.dtype]
    return BFLOAT16_DOT if is_faster else BFLOAT16


def linear_tag() -> np.generic:
    """The format tag of the base model's weights in bfloat16."""
    return BFLOAT16_TILES if has_matrix_registers() else bfloat16_tag()


def describe() -> str:
    """The level of this process's kernels, and the part of it that is not used."""
    isa = process_isa()
    described = isa.name
    if isa.has_bfloat16_dot and bfloat16_tag().dtype != BFLOAT16_DOT.dtype:
        described += " without pairs (they are slower here than float32)"
    if has_matrix_registers():
        described += ", base weights in matrix registers (AMX)"
    return described


def products_per_loop(tag: np.generic) -> int:
    """Products, each with its sum, of one loop of ``spin``."""
    neighbours = 2 if tag.dtype == BFLOAT16_DOT.dtype else 1
    if tag.dtype.name in CODED:
        neighbours = 32 // CODED[tag.dtype.name].x_bits
    return neighbours * process_isa().lanes * NUM_SUMS * _UNROLLED


def products_per_s(tag: np.generic) -> float:
    """Multiplications per second of one core of this machine with ``tag``, measured now."""
    spin(tag, _MEASURED_LOOPS)  # compiles
    samples = []
    for _ in range(_MEASURED_ROUNDS):
        start = time.perf_counter()
        spin(tag, _MEASURED_LOOPS)
        samples.append(time.perf_counter() - start)
    return products_per_loop(tag) * _MEASURED_LOOPS / min(samples)


@emits("loops", result=types.float32)
def _multiply_in_registers(emit: Emitter, loops: ir.Value) -> ir.Value:
    """Repeated products of as many sums as registers hold; returns one of the sums."""
    is_integer = emit.tag.name in CODED
    integers = Integers(emit) if is_integer else None
    emit = emit.of_registers()
    factor = _ones(emit)

    def multiply(total: ir.Value) -> ir.Value:
        if integers is None:
            return emit.multiply_piece(factor, factor, total)
        # With the sum itself: LLVM moves products that do not change out of the loop.
        return integers.multiply_add(factor, total, total)

    def body(_: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        for _ in range(_UNROLLED):
            totals = [multiply(total) for total in totals]
        return totals

    first, *others = emit.loop(loops, [factor] * NUM_SUMS if is_integer else NUM_SUMS, body)
    for other in others:
        first = emit.builder.fadd(first, other)
    return emit.builder.extract_element(first, I32(0))


def _ones(emit: Emitter) -> ir.Value:
    """A vector of ones that LLVM cannot fold."""
    builder = emit.builder
    slot = builder.alloca(emit.f32s)
    builder.store(ir.Constant(emit.f32s, [1.0] * emit.lanes), slot)
    value = emit.load(builder.ptrtoint(slot, I64), F32)
    bits = builder.bitcast(emit.splat(value, emit.lanes), emit.i32s)
    return builder.bitcast(bits, BF16X32 if emit.has_dot else emit.f32s)


@kernel()
def spin(tag: Any, loops: int) -> float:
    """Multiply and add in registers alone: ``products_per_loop`` in each loop."""
    result: float = _multiply_in_registers(tag, loops)
    return result
