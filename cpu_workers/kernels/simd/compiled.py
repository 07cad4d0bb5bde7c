"""Builds kernels from functions that numba compiles.

numba compiles a function again into each caller, and the contents of a parallel loop five times:
into the loop's function, two wrappers of it and the kernel. For vector code this dominates the time
of a first start. So only kernels get what Python needs to call them, functions with one caller are
inlined into it, and parallel loops call through an address.

numba's cache entry of a kernel contains all of its parts, and both ends of every call. numba
detects changes only in the kernel's own file and in the values that the kernel closes over. So
kernels close over a digest of all files with code that they may contain.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from ....shm.kept_code import keeps_code

Function = TypeVar("Function", bound=Callable[..., Any])

_SIMD = Path(__file__).parent
_SHM = _SIMD.parents[2] / "shm"
# Modules that any kernel may contain besides those of its own folder.
_COMMON_SOURCES = (
    *sorted(_SIMD.glob("*.py")),
    *(_SHM / name for name in ("atomics.py", "futex.py", "layout.py", "park.py", "region.py")),
)

# A part of kernels, which Python does not call.
part: Callable[[Function], Function] = njit(
    error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
# A large part with one caller, into which it is inlined.
inlined_part: Callable[[Function], Function] = njit(error_model="numpy", inline="always")


def kernel(*signatures: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function that Python calls, compiled for each tuple of types, without the GIL, and cached.

    Compiled at once for the ``signatures``. It is compiled again if a source of its folder or of
    ``simd`` changes. ``options``: further ones of ``numba.njit``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        assert isinstance(function, FunctionType) and function.__closure__ is None, function
        # A free variable that the code does not use: its value is a part of numba's cache key.
        bound = FunctionType(
            function.__code__.replace(co_freevars=("sources_digest",)),
            function.__globals__,
            function.__name__,
            closure=(CellType(sources_digest(Path(function.__code__.co_filename).parent)),),
        )
        bound.__doc__, bound.__module__ = function.__doc__, function.__module__
        bound.__qualname__ = function.__qualname__
        kept = keeps_code(function.__code__.co_filename)
        settings = {"error_model": "numpy", "cache": kept, "nogil": True} | options
        return njit(list(signatures) or None, **settings)(bound)

    return decorate


@cache
def sources_digest(folder: Path) -> str:
    """Digest of the sources that a kernel in ``folder`` may contain."""
    digest = hashlib.sha256()
    for source in dict.fromkeys((*sorted(folder.glob("*.py")), *_COMMON_SOURCES)):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def function_address(function: Any, kinds: tuple[types.Type, ...]) -> int:
    """The address of a numba function for arguments of these types, for ``call_function``.

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
    """Call a numba function that returns nothing, with a tuple of its arguments.

    The types in the tuple must be those for which the address was requested.
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


@intrinsic
def _own_thread_id(typing_context: Any) -> tuple[Any, Any]:
    """The kernel's id of the calling thread; by libc, so that it can be cached."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        function = builder.module.globals.get("gettid") or ir.Function(builder.module, kind, "gettid")
        return builder.call(function, [])

    return types.int32(), codegen


@kernel(parallel=True)
def record_thread_ids(ids: np.ndarray) -> None:
    """Write the id of the thread that computes each part of a loop.

    ids: int32 [threads], at most as many as numba has started.
    """
    for worker in prange(len(ids)):
        ids[worker] = _own_thread_id()
