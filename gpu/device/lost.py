"""Decides which failures mean that this process has lost its CUDA device.

After some errors CUDA answers every later call with the same error, and the documentation says that
the process must be ended. An engine that continued would fail every request and report itself
healthy. Out of memory, or any Python exception, is not of this kind: it fails one step.
"""

from collections.abc import Iterator

import torch

from ...runtime.errors import EngineDeadError

# Numbers of cudaError_t (CUDA runtime API, "Data types used by CUDA Runtime"); CUresult uses the
# same numbers for these.
STICKY_CODES = {
    214: "an uncorrectable ECC error",
    220: "an uncorrectable NVLink error",
    226: "a contained memory error",
    700: "an illegal address",
    702: "a kernel that ran too long",
    709: "a context that was destroyed",
    710: "an assertion on the device",
    714: "a hardware stack error",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an address of another address space",
    718: "an invalid program counter",
    719: "a kernel that failed",
    721: "tensor memory that was not given back",
    911: "a failure of an external device",
    999: "an unknown failure",
}


def raise_if_lost(error: BaseException) -> None:
    """Raise ``EngineDeadError`` from ``error`` if this process can no longer use the device.

    torch reports CUDA's error code (``torch.AcceleratorError.error_code``). Other libraries report
    only a text, and often late: if CUDA is in use, the device is queried as well.
    """
    code = next(filter(STICKY_CODES.__contains__, _codes(error)), None)
    if code is None and torch.cuda.is_initialized():
        try:
            torch.cuda.current_stream().query()  # returns at once, and raises sticky errors
        except torch.AcceleratorError as answer:
            code = next(filter(STICKY_CODES.__contains__, _codes(answer)), None)
    if code is not None:
        raise EngineDeadError(
            f"the CUDA device is lost to this process by {STICKY_CODES[code]} (CUDA error {code}); "
            f"the engine stops; start it again: {type(error).__name__}: {error}"
        ) from error


def _codes(error: BaseException) -> Iterator[int]:
    """CUDA's codes of an exception and of its causes."""
    seen: set[int] = set()
    open_errors = [error]
    while open_errors:
        one = open_errors.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.AcceleratorError):
            yield int(getattr(one, "error_code", -1))
        open_errors += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
