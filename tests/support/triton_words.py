"""Runs the Triton kernels of words in a process of their own: ``interpret`` or ``compile``."""

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable

import triton.language as tl
from corun.gpu.device import cuda_kernels
from corun.gpu.device.cuda_kernels import TritonKernels
from corun.shm.words import wrap

HAS_ATOMICS = hasattr(tl, "atomic_poll")
VALUES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -5)


class CallAtOnce:
    """The only thing that the kernels ask of a runtime."""

    def call(self, stream: object, compute: Callable[[], None]) -> None:
        compute()


def interpret() -> None:
    """Both variants, that of Triton 3.9 and that of older ones, on words of this process."""
    assert cuda_kernels.IS_INTERPRETED
    for has_atomics in sorted({HAS_ATOMICS, False}):
        cuda_kernels.HAS_ATOMICS = has_atomics
        kernels = TritonKernels(CallAtOnce())  # type: ignore[arg-type]
        for value in VALUES:
            _check_signal(kernels, value)
            _check_wait(kernels, value)
        _check_late_store(kernels)


def _check_signal(kernels: TritonKernels, value: int) -> None:
    line = (ctypes.c_int32 * 3)(7, 7, 7)
    kernels.signal(None, ctypes.addressof(line) + 4, value)
    assert list(line) == [7, wrap(value), 7], (value, list(line))


def _check_wait(kernels: TritonKernels, value: int) -> None:
    for ahead, is_reached in ((0, True), (1, True), (2**31 - 1, True), (-1, False), (2**31, False)):
        word, status = ctypes.c_int32(wrap(value + ahead)), ctypes.c_int32(0)
        addresses = ctypes.addressof(word), ctypes.addressof(status)
        kernels.wait(None, addresses[0], value, addresses[1], timeout_s=1e-5)
        assert word.value == wrap(value + ahead), "a wait must not write to the word"
        assert status.value == (not is_reached), (value, ahead, status.value)


def _check_late_store(kernels: TritonKernels) -> None:
    """A store past the value ends the wait, which is then no failure."""
    word, status = ctypes.c_int32(-3), ctypes.c_int32(0)

    def store() -> None:
        time.sleep(0.05)
        word.value = 4

    writer = threading.Thread(target=store)
    writer.start()
    kernels.wait(None, ctypes.addressof(word), 2, ctypes.addressof(status), timeout_s=10.0)
    assert word.value == 4, "the wait must not end before the store"
    assert status.value == 0
    writer.join()


def compile_for_hopper() -> None:
    """Compile every variant to machine code, without a device, and print their assembly."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"word": "i64", "value": "i32", "status": "i64", "max_polls": "i32"}
    assembly = {}
    for has_atomics in sorted({HAS_ATOMICS, False}):
        constants = {"has_atomics": has_atomics, "is_interpreted": False, "poll_ns": 500}
        for kernel in (cuda_kernels.signal_kernel, cuda_kernels.wait_kernel):
            names = kernel.arg_names
            source = ASTSource(
                fn=kernel,
                signature={name: types.get(name, "constexpr") for name in names},
                constexprs={(names.index(n),): v for n, v in constants.items() if n in names},
            )
            options = {"num_warps": 1}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert compiled.asm["cubin"]
            assembly[f"{kernel.__name__} {has_atomics}"] = compiled.asm["ptx"]
    json.dump(assembly, sys.stdout)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_hopper}[sys.argv[1]]()
