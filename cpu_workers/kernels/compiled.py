"""How kernels are put together from functions that numba compiles.

numba compiles a function again into each that calls it, and what a parallel loop contains five
times: into the loop's function, two wrappers of it and the kernel. For code of vectors that is the
time of a first start. So nobody but a kernel gets what only Python needs, functions of one caller
are written into it, and parallel loops call through an address.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

# A part of kernels, which Python does not call.
part: Callable[[Function], Function] = njit(
    error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
# A large part with one caller, into which it is written.
inlined_part: Callable[[Function], Function] = njit(error_model="numpy", inline="always")


def function_address(function: Any, kinds: tuple[types.Type, ...]) -> int:
    """The address of a function of numba's for arguments of these types, for ``call_function``.

    Compiles it, or loads it from numba's cache.
    """
    function.compile(kinds)
    compiled = function.overloads[kinds]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    return address


@intrinsic
def call_function(typing_context: Any, address: Any, arguments: Any) -> tuple[Any, Any]:
    """Call the function at ``address``, which returns nothing, with a tuple of numbers."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[1])
        # What a function of numba's that returns nothing returns in C.
        kind = ir.FunctionType(ir.IntType(8).as_pointer(), [value.type for value in values])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen
