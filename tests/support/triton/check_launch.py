"""Launches a kernel as Triton does and as corun does, on a driver that launches nothing.

Run as a program. Nothing is compiled: what stands for a compiled kernel notes its calls. Asserts
that both ways call the same variant with the same arguments. Prints the numbers of launches, and of
those that went through Triton's own code a second time.
"""

import itertools
import json
import sys
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from corun.gpu.forward.triton_launch import KernelLauncher
from support.triton.count_variants import Hopper
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_HEAD = 6  # grid, stream, function, its metadata; three of a profiler follow
_FREE = (1, 16, 2**31)
_FIXED = (1, 16, 17, 32, 2**31)
_NUMBERS = itertools.count(1)
_MEMORY = torch.zeros(64, dtype=torch.int16)


class _Driver(Hopper):
    device = stream = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream


class _Compiled:
    """Stands for a compiled kernel."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012 (one list of all)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.function = next(_NUMBERS)
        self.packed_metadata = (self.function,)

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        given = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
        # Triton skips the values of constants, which are the last two.
        self.calls.append((len(given), *given[:_HEAD], *given[_HEAD + 3 : -2]))


@triton.jit(do_not_specialize=["free"])  # type: ignore[untyped-decorator]
def _kernel(
    x: tl.tensor,
    scale: tl.tensor,
    y: tl.tensor,
    free: tl.tensor,
    fixed: tl.tensor,
    first: tl.constexpr,
    second: tl.constexpr,
) -> None:
    tl.store(y, tl.load(x + fixed) * scale + free)


def _launch_all(launch: Any) -> list[tuple[Any, ...]]:
    """Launch every combination; returns the calls."""
    _Compiled.calls.clear()
    current = driver.active
    for offset, dtype, free, fixed, first in itertools.product(
        (0, 4), (torch.float16, torch.bfloat16), _FREE, _FIXED, (1, 2)
    ):
        for current.device, num_warps in ((0, 4), (1, 4), (0, 8)):
            current.stream += 1
            x, y = _MEMORY.view(dtype)[offset:], _MEMORY.view(dtype)[32:]
            for one, other in ((x, y), (y, x)):
                launch(
                    (3, fixed % 7 + 1),
                    one,
                    0.5,
                    other,
                    free,
                    fixed,
                    first=first,
                    second="s",
                    num_warps=num_warps,
                )
    current.stream = 0
    return list(_Compiled.calls)


def main() -> None:
    """Compare both ways."""
    driver.set_active(_Driver())
    launcher = KernelLauncher(_kernel)
    with mock.patch.object(triton.compiler, "compile", _Compiled):
        own = _launch_all(lambda grid, *arguments, **constants: _kernel[grid](*arguments, **constants))
        assert _launch_all(launcher) == own
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
            assert _launch_all(launcher) == own
    variants = len({call[5] for call in own})
    json.dump({"launches": len(own), "variants": variants, "of Triton": run.call_count}, sys.stdout)


if __name__ == "__main__":
    main()
