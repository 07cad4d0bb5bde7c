"""Makes intrinsics of numba from functions that emit LLVM code."""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .emitter import Emitter

# For ``emits``, if the format of the emitter does not matter.
ANY_FORMAT = types.uint16


def emits(
    names: str = "", /, tag: types.Type | None = None, result: types.Type = types.void, **kinds: types.Type
) -> Callable[[Callable[..., Any]], Any]:
    """Make a numba intrinsic of ``function(emitter, *values)``.

    The intrinsic takes a format tag, which selects code by its type, then one argument for each of
    ``names``, which spaces separate: int64 unless ``kinds`` says otherwise. With ``tag`` it takes
    no tag, and has that format. The function returns a value of numba's type ``result``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        given = [kinds.get(name, types.int64) for name in names.split()]

        def typed(typing_context: Any, *arguments: Any) -> Any:
            tags = [] if tag is not None else [arguments[0]]
            signature = result(*tags, *given)

            def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                format_tag = signature.args[0] if tag is None else tag
                emitted = function(Emitter(builder, format_tag), *values[len(tags) :])
                return context.get_dummy_value() if emitted is None else emitted

            return signature, codegen

        typed.__name__, typed.__doc__ = function.__name__, function.__doc__
        parameters = ("typing_context", *(("tag",) if tag is None else ()), *names.split())
        typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in parameters]
        )
        return intrinsic(typed)

    return decorate
