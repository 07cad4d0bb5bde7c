"""bfloat16 in kernels that are compiled from Python: as uint16, because numba has no such type."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .emitter import F32, I32, bfloat16_bits


@intrinsic
def pointer(typingctx: Any, address: types.Type, like: types.Type) -> tuple[Any, Any]:
    """A pointer to values of ``like``'s type at ``address``."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), codegen


@intrinsic
def widened(typingctx: Any, bits: types.Type) -> tuple[Any, Any]:
    """The float32 of a bfloat16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        return builder.bitcast(builder.shl(builder.zext(args[0], I32), I32(16)), F32)

    return types.float32(types.uint16), codegen


@intrinsic
def rounded(typingctx: Any, value: types.Type) -> tuple[Any, Any]:
    """The bfloat16 of a result of arithmetic on bfloat16: see ``bfloat16_bits``."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> Any:
        return bfloat16_bits(builder, args[0])

    return types.uint16(types.float32), codegen
