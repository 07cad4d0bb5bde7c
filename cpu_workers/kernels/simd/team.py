"""The threads that compute a parallel loop of kernels."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from .compiled import kernel


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
