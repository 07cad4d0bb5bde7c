"""How kernels are put together from functions that numba compiles.

numba compiles a function again into each that calls it, and what a parallel loop contains five
times: into the loop's function, two wrappers of it and the kernel. For code of vectors that is the
time of a first start. So nobody but a kernel gets what only Python needs, functions of one caller
are written into it, and parallel loops call through an address.

What numba keeps of a kernel holds all of its parts, and both ends of every call.
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
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


@intrinsic
def address_of(typing_context: Any, function: Any, arguments: Any) -> tuple[Any, Any]:
    """The address of a part of this kernel, for ``call_function`` with such a tuple."""
    kinds = _kinds(arguments)
    function.dispatcher.compile(kinds)
    compiled = function.dispatcher.overloads[kinds]

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        context.add_linking_libs([compiled.library])
        declared = context.declare_function(builder.module, compiled.fndesc)
        return builder.ptrtoint(declared, context.get_value_type(types.int64))

    return types.int64(function, arguments), codegen


@intrinsic
def call_function(typing_context: Any, address: Any, arguments: Any) -> tuple[Any, Any]:
    """Call a function of numba's, which returns nothing, with a tuple of what it takes.

    The types in the tuple must be those that the address was asked for with.
    """
    kinds = _kinds(arguments)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        convention = context.call_conv
        kind = convention.get_function_type(types.none, kinds)
        function = builder.inttoptr(args[0], kind.as_pointer())
        values = cgutils.unpack_tuple(builder, args[1])
        status, _ = convention.call_function(builder, function, types.none, kinds, values)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen


def _kinds(arguments: Any) -> tuple[types.Type, ...]:
    return tuple(types.unliteral(kind) for kind in arguments.types)
