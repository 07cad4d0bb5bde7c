"""Launches Triton kernels with a fraction of the host's work of Triton's own call.

Importing this module imports Triton; back ends import it when they need it.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from triton.runtime import driver

_LOG = logging.getLogger(__name__)

_ALIGNMENT = 16  # bytes; addresses that are multiples of it have variants of their own
_INT32_LIMIT = 1 << 31
_MEMBERS = ("run", "function", "packed_metadata")  # of what Triton compiles


class KernelLauncher:
    """A Triton kernel, and its variants that were launched.

    Triton chooses a variant by constants and options, by types and alignment of tensors, and by
    numbers unless the kernel does not specialise them. These are the key here, numbers by their
    value. The first launches of a key are Triton's own calls, which compile; later ones call what
    was compiled, without the hooks of Triton's profiler. Not for kernels that do not specialise
    alignment.
    """

    def __init__(self, kernel: Any) -> None:
        """``kernel``: a function of ``triton.jit``, also an interpreted one."""
        self.kernel = kernel
        self._variants: dict[object, tuple[Any, ...]] = {}
        self._tensor_places: Sequence[int] = ()  # among the arguments; empty until one is compiled
        self._tensors = self._specialised = self._others = _picker(())
        self._constants: Sequence[None] = ()  # their places in a call of what was compiled

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch on the current stream of the current device.

        ``arguments``: tensors, int and float, the same kinds in every call; ``constants``: those of
        the kernel and options of the compiler, in the same order in every call.
        """
        # A number of 64 bits is of another type, and so has another variant.
        if not self._tensor_places or max(self._others(arguments)) >= _INT32_LIMIT:
            self._learn(self.kernel[grid](*arguments, **constants), arguments)
            return
        tensors = self._tensors(arguments)
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        device = driver.active.get_current_device()
        key = (
            device,
            tuple([tensor.dtype for tensor in tensors]),
            bits % _ALIGNMENT and tuple([address % _ALIGNMENT for address in addresses]),
            self._specialised(arguments),
            *constants.values(),
        )
        variant = self._variants.get(key)
        if variant is None:
            compiled = self.kernel[grid](*arguments, **constants)
            self._variants[key] = tuple(getattr(compiled, name) for name in _MEMBERS)
            return
        run, function, metadata = variant
        given = list(arguments)
        for place, address in zip(self._tensor_places, addresses, strict=False):  # one is there twice
            given[place] = address
        stream = driver.active.get_current_stream(device)
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream, function, metadata, None, None, None, *given, *self._constants)

    def _learn(self, compiled: Any, arguments: Sequence[Any]) -> None:
        """Sort the arguments once Triton has compiled the kernel: it does not if it interprets."""
        if compiled is None or self._tensor_places:
            return
        if not all(hasattr(compiled, name) for name in _MEMBERS):
            _say_once(f"{type(compiled).__name__} of this Triton is not of the known form")
            return
        tensors, specialised, others = list[int](), list[int](), list[int]()
        for place, (one, parameter) in enumerate(zip(arguments, self.kernel.params, strict=False)):
            if hasattr(one, "data_ptr"):
                tensors.append(place)
            elif isinstance(one, float) or parameter.do_not_specialize:
                others.append(place)
            else:
                specialised.append(place)
        self._tensors, self._specialised, self._others = map(_picker, (tensors, specialised, others))
        self._constants = (None,) * sum(parameter.is_constexpr for parameter in self.kernel.params)
        self._tensor_places = tensors


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns the arguments at ``places`` as a tuple; the first one twice, (0,) for none."""
    return itemgetter(*places, places[0]) if places else lambda _: (0,)


@cache
def _say_once(reason: str) -> None:
    _LOG.warning("Triton kernels are launched in Triton's own way, which is slower: %s", reason)
