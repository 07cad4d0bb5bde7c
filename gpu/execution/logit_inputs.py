"""The two inputs of the sampler that change logits: masks of allowed tokens, and added values.

One kernel applies both to all rows: numba's on the CPU, Triton's on CUDA. They are copied to the
device without waiting for it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...cpu_workers.kernels.logits import adjust_logits
from .token_rules import WORD_BITS

_NOTHING = float("-inf")


class LogitInputs:
    """Collects the inputs of the rows of one step, and applies them; used again for each step.

    A step must have waited for the device before the next one applies its inputs.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty((0, 0), dtype=torch.int32)  # of masks
        self.begin()

    def begin(self) -> None:
        """Forget the inputs of an earlier step."""
        self._masks: list[Sequence[NDArray[np.int32]]] = []  # of each row in ``_mask_rows``
        self._mask_rows: list[int] = []
        self._rows: list[int] = []
        self._token_ids: list[int] = []
        self._values: list[float] = []

    def __bool__(self) -> bool:
        """Whether any row has an input."""
        return bool(self._mask_rows or self._rows)

    def allow(self, row: int, *masks: NDArray[np.int32]) -> None:
        """Allow only tokens with a bit in all ``masks``; shorter masks lack the last bits."""
        self._mask_rows.append(row)
        self._masks.append(masks)

    def add(self, row: int, token_ids: Sequence[int], values: Sequence[float]) -> None:
        """Add ``values`` to the logits of ``token_ids``."""
        self._rows += [row] * len(token_ids)
        self._token_ids += token_ids
        self._values += values

    def forbid(self, row: int, token_ids: Sequence[int]) -> None:
        """Forbid ``token_ids``."""
        self.add(row, token_ids, [_NOTHING] * len(token_ids))

    def apply(self, logits: torch.Tensor) -> None:
        """Change ``logits``, float32 [rows, vocabulary] without gaps, in place.

        Tokens beyond the vocabulary are ignored.
        """
        is_cuda = logits.is_cuda
        num_words = -(-logits.shape[1] // WORD_BITS)
        masks = self._joined(num_words, is_cuda=is_cuda)
        mask_rows = torch.tensor(self._mask_rows, dtype=torch.int32, pin_memory=is_cuda)
        entries = torch.empty((3, len(self._rows)), dtype=torch.int32, pin_memory=is_cuda)
        array = entries.numpy()
        array[0], array[1] = self._rows, self._token_ids
        array[2] = np.array(self._values, dtype=np.float32).view(np.int32)
        if is_cuda:
            from .triton_kernels import adjust_logits_on_cuda

            copies = [x.to(logits.device, non_blocking=True) for x in (masks, mask_rows, entries)]
            adjust_logits_on_cuda(logits, *copies)
            return
        assert logits.is_contiguous() and logits.dtype == torch.float32
        adjust_logits(
            logits.data_ptr(), logits.shape[1], masks.data_ptr(), mask_rows.data_ptr(),
            len(mask_rows), num_words, entries.data_ptr(), entries.shape[1],
        )  # fmt: skip

    def _joined(self, num_words: int, *, is_cuda: bool) -> torch.Tensor:
        """One mask a row: int32 [masks, num_words], in memory that the next step uses again."""
        num_masks = len(self._masks)
        if self._buffer.shape[0] < num_masks or self._buffer.shape[1] != num_words:
            shape = (max(num_masks, 2 * self._buffer.shape[0]), num_words)
            self._buffer = torch.empty(shape, dtype=torch.int32, pin_memory=is_cuda)
        masks = self._buffer[:num_masks]
        for target, parts in zip(masks.numpy(), self._masks, strict=True):
            _intersect(target, parts)
        return masks


def warm_up_inputs(logits: torch.Tensor) -> None:
    """Compile or load the kernel of the device; ``logits`` as for ``LogitInputs.apply``."""
    inputs = LogitInputs()
    inputs.allow(0, np.zeros(1, dtype=np.int32))
    inputs.forbid(0, [0])
    inputs.apply(logits)


def _intersect(target: NDArray[np.int32], masks: Sequence[NDArray[np.int32]]) -> None:
    """Write the bits that are in all ``masks`` to ``target``."""
    num_words = min(len(target), *(len(mask) for mask in masks))
    target[:num_words] = masks[0][:num_words]
    target[num_words:] = 0
    for mask in masks[1:]:
        target[:num_words] &= mask[:num_words]
