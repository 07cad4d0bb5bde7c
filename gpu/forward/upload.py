"""Copies host arrays to the device together: one copy, for which nothing waits."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers with less

Arrays = Mapping[str, NDArray[np.generic]]


class Mirror:
    """Arrays of the host with copies on the device, which stay at their addresses.

    Rows that change on the host reach the device with the next ``upload`` of this mirror. On the
    CPU the tensors are the arrays' own memory, and nothing is copied.
    """

    def __init__(self, arrays: Sequence[NDArray[np.generic]], device: torch.device) -> None:
        """Copy the arrays, all with the same number of rows, and wait for it."""
        self._arrays = tuple(arrays)
        self.is_copied = device.type != "cpu"  # otherwise the memory is shared
        self._changed: set[int] = set()
        self.tensors = tuple(torch.from_numpy(array).to(device) for array in arrays)

    def mark(self, rows: Iterable[int]) -> None:
        """Note that these rows have changed on the host."""
        if self.is_copied:
            self._changed.update(rows)

    @property
    def is_current(self) -> bool:
        """Whether the device has all changes, or gets them before work that comes now."""
        return not self._changed

    def changes(self) -> list[NDArray[np.generic]]:
        """The changed rows, int64, and the values of each array there."""
        rows = np.array(sorted(self._changed), dtype=np.int64)
        return [rows, *(array[rows] for array in self._arrays)]

    def apply(self, rows: torch.Tensor, *values: torch.Tensor) -> None:
        """Write ``changes``, which are on the device now, without waiting for it."""
        for tensor, part in zip(self.tensors, values, strict=True):
            tensor.index_copy_(0, rows, part)
        self._changed.clear()


def upload(arrays: Arrays, device: torch.device, mirrors: Sequence[Mirror] = ()) -> dict[str, torch.Tensor]:
    """Copy arrays and the changes of mirrors to the device in one piece of pinned memory.

    Returns tensors of the same shapes and dtypes. On the CPU they are the arrays' own memory.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    changed = [(mirror, mirror.changes()) for mirror in mirrors if not mirror.is_current]
    parts = iter(_send([*arrays.values(), *(a for _, some in changed for a in some)], device))
    sent = dict(zip(arrays, parts, strict=False))
    for mirror, some in changed:
        mirror.apply(*(next(parts) for _ in some))
    return sent


def _send(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    if not arrays:
        return []
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    # torch uses pinned memory again only after the copies from it.
    piece = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    start, host = 0, piece.numpy()
    for array, size in zip(arrays, sizes, strict=True):
        host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        start += size
    return [
        part[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, part in zip(arrays, piece.to(device, non_blocking=True).split(sizes), strict=True)
    ]
