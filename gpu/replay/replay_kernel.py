"""Makes a list of kernel calls in one compiled loop.

A call uses the address of the kernel's C function. Its arguments are in memory, 8 bytes each; their
types are one of the ``SIGNATURES``. Independent of what the kernels compute.
"""

from llvmlite import ir
from numba import types

from ...cpu_workers.kernels.simd.compiled import kernel
from ...cpu_workers.kernels.simd.emitter import I64, Emitter
from ...cpu_workers.kernels.simd.intrinsics import ANY_FORMAT, emits
from ...cpu_workers.kernels.simd.memory import int64_at

# One letter per argument. The first argument of some kernels selects code only by its type.
LETTERS = {
    types.int64: "q",
    types.uint64: "Q",
    types.float64: "d",
    types.float32: "f",
    types.int32: "i",
    types.uint32: "I",
    types.int16: "h",
    types.uint16: "H",
    types.int8: "c",
    types.uint8: "C",
    types.boolean: "b",
}
_LLVM_TYPES = {
    "q": I64,
    "Q": I64,
    "d": ir.DoubleType(),
    "f": ir.FloatType(),
    "i": ir.IntType(32),
    "I": ir.IntType(32),
    "h": ir.IntType(16),
    "H": ir.IntType(16),
    "c": ir.IntType(8),
    "C": ir.IntType(8),
    "b": ir.IntType(1),
}
_ATTEND = "q" * 13 + "ddq"
_ADD_DELTAS = "q" * 14
_MULTIPLY = "q" * 10
SIGNATURES = (
    *(tag + _MULTIPLY for tag in "bdqQiIhHcC"),
    "qqqqqqfbq",  # norms
    "q" * 9,  # gated activations
    "q" * 17,  # rotations
    "q" * 5,  # sums
    "bqqqqqq",  # factors of adapters
    *(tag + _ATTEND for tag in "hHf"),
    *(tag + _ADD_DELTAS for tag in "hHf"),
)
# Fields of a call: number of its signature, address of the C function, address of the arguments.
CALL_FIELDS = 3
_SIGNATURE, _FUNCTION, _ARGUMENTS = range(CALL_FIELDS)


def _emit_call(builder: ir.IRBuilder, letters: str, function: ir.Value, arguments: ir.Value) -> None:
    kinds = [_LLVM_TYPES[letter] for letter in letters]
    values = []
    for index, kind in enumerate(kinds):
        place = builder.add(arguments, I64(8 * index))
        # The lowest of 8 bytes counts; an i1 is a whole byte in memory.
        stored = ir.IntType(8) if kind == ir.IntType(1) else kind
        value = builder.load(builder.inttoptr(place, stored.as_pointer()))
        values.append(value if stored is kind else builder.trunc(value, kind))
    # The C return value of a numba function that returns nothing.
    result = ir.IntType(8).as_pointer()
    builder.call(builder.inttoptr(function, ir.FunctionType(result, kinds).as_pointer()), values)


@emits("signature function arguments", tag=ANY_FORMAT)
def _call(emit: Emitter, signature: ir.Value, function: ir.Value, arguments: ir.Value) -> None:
    """Call the C function at an address, with the types of the numbered signature."""
    builder = emit.builder
    after = builder.append_basic_block("after")
    switch = builder.switch(signature, after)
    for index, letters in enumerate(SIGNATURES):
        block = builder.append_basic_block(f"call_{letters}")
        switch.add_case(I64(index), block)
        builder.position_at_end(block)
        _emit_call(builder, letters, function, arguments)
        builder.branch(after)
    builder.position_at_end(after)


@kernel()
def replay(calls: int, num_calls: int) -> None:
    """Make the calls in order. calls: address of int64 [num_calls, CALL_FIELDS]."""
    for index in range(num_calls):
        call = calls + 8 * CALL_FIELDS * index
        _call(int64_at(call, _SIGNATURE), int64_at(call, _FUNCTION), int64_at(call, _ARGUMENTS))
