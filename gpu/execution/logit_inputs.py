"""The inputs of the sampler that change logits: masks of allowed tokens, added values, penalties.

One kernel applies masks and added values to all rows: numba's on the CPU, Triton's on CUDA.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...cpu_workers.kernels.logits import adjust_logits
from ..forward.upload import upload
from .request_table import RequestState
from .token_rules import WORD_BITS

_NOTHING = float("-inf")


class LogitInputs:
    """Collects the inputs of the rows of one step, and applies them; used again for each step."""

    def __init__(self, num_columns: int = 0) -> None:
        """``num_columns``: tokens of the vocabulary."""
        self._buffer = np.empty((0, 0), dtype=np.int32)  # of masks
        self.begin(num_columns)

    def begin(self, num_columns: int) -> None:
        """Forget the inputs of an earlier step."""
        self._num_columns = num_columns
        self._masks: list[Sequence[NDArray[np.int32]]] = []  # of each row in ``_mask_rows``
        self._mask_rows: list[int] = []
        self._rows: list[int] = []
        self._token_ids: list[int] = []
        self._values: list[float] = []
        # Places in the flat logits, and a value for each. No place occurs twice.
        self._factors: list[tuple[NDArray[np.int64], float]] = []
        self._summands: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []

    def allow(self, row: int, *masks: NDArray[np.int32]) -> None:
        """Allow only tokens with a bit in all ``masks``; shorter masks lack the last bits."""
        self._mask_rows.append(row)
        self._masks.append(masks)

    def add(self, row: int, token_ids: Sequence[int], values: Sequence[float]) -> None:
        self._rows += [row] * len(token_ids)
        self._token_ids += token_ids
        self._values += values

    def forbid(self, row: int, token_ids: Sequence[int]) -> None:
        self.add(row, token_ids, [_NOTHING] * len(token_ids))

    def penalise(self, row: int, state: RequestState) -> None:
        """Apply the penalties of a request, after all masks and added values.

        ``repetition_penalty`` divides positive and multiplies negative logits of tokens in prompt
        or output. Presence and frequency penalties are then subtracted for tokens in the output.
        """
        sampling, first = state.sampling, row * self._num_columns
        if sampling.repetition_penalty != 1.0:
            self._factors.append((state.seen_tokens() + first, sampling.repetition_penalty))
        if sampling.presence_penalty or sampling.frequency_penalty:
            tokens, counts = state.output_counts()
            presence = np.float32(sampling.presence_penalty)
            penalties = presence + np.float32(sampling.frequency_penalty) * counts
            self._summands.append((tokens + first, -penalties))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The inputs, to be uploaded; valid until ``begin``."""
        arrays: dict[str, NDArray[np.generic]] = {}
        if self._mask_rows or self._rows:
            entries = np.empty((3, len(self._rows)), dtype=np.int32)
            entries[0], entries[1] = self._rows, self._token_ids
            entries[2] = np.array(self._values, dtype=np.float32).view(np.int32)
            arrays["entries"] = entries
            arrays["masks"] = self._joined()
            arrays["mask_rows"] = np.array(self._mask_rows, dtype=np.int32)
        if self._factors:
            places = [places for places, _ in self._factors]
            penalties = np.array([penalty for _, penalty in self._factors], dtype=np.float32)
            arrays["factor_places"] = np.concatenate(places)
            arrays["factors"] = penalties.repeat([len(some) for some in places])
        if self._summands:
            arrays["summand_places"] = np.concatenate([places for places, _ in self._summands])
            arrays["summands"] = np.concatenate([values for _, values in self._summands])
        return arrays

    def apply(self, logits: torch.Tensor, sent: Mapping[str, torch.Tensor]) -> None:
        """Change ``logits``, float32 [rows, vocabulary] without gaps, in place.

        ``sent``: the arrays on the device. Tokens beyond the vocabulary are ignored.
        """
        assert logits.is_contiguous() and logits.dtype == torch.float32
        if "entries" in sent:
            _adjust(logits, sent["masks"], sent["mask_rows"], sent["entries"])
        flat = logits.view(-1)
        if "factors" in sent:
            places, penalties = sent["factor_places"], sent["factors"]
            values = flat.index_select(0, places)
            values = torch.where(values > 0, values / penalties, values * penalties)
            flat.index_copy_(0, places, values)
        if "summands" in sent:
            flat.index_add_(0, sent["summand_places"], sent["summands"])

    def _joined(self) -> NDArray[np.int32]:
        """One mask a row: int32 [masks, words], in memory that the next step uses again."""
        num_masks, num_words = len(self._masks), -(-self._num_columns // WORD_BITS)
        if self._buffer.shape[0] < num_masks or self._buffer.shape[1] != num_words:
            shape = (max(num_masks, 2 * self._buffer.shape[0]), num_words)
            self._buffer = np.empty(shape, dtype=np.int32)
        masks = self._buffer[:num_masks]
        for target, parts in zip(masks, self._masks, strict=True):
            _intersect(target, parts)
        return masks


def warm_up_inputs(logits: torch.Tensor) -> None:
    """Compile or load the kernel of the device; ``logits`` as for ``LogitInputs.apply``."""
    inputs = LogitInputs(logits.shape[1])
    inputs.allow(0, np.zeros(1, dtype=np.int32))
    inputs.forbid(0, [0])
    inputs.apply(logits, upload(inputs.arrays(), logits.device))


def _adjust(
    logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor, entries: torch.Tensor
) -> None:
    """Apply masks and added values; see the kernels."""
    if logits.is_cuda:
        from .triton_kernels import adjust_logits_on_cuda

        adjust_logits_on_cuda(logits, masks, mask_rows, entries)
        return
    adjust_logits(
        logits.data_ptr(),
        logits.shape[1],
        masks.data_ptr(),
        mask_rows.data_ptr(),
        len(mask_rows),
        masks.shape[1],
        entries.data_ptr(),
        entries.shape[1],
    )


def _intersect(target: NDArray[np.int32], masks: Sequence[NDArray[np.int32]]) -> None:
    """Write the bits that are in all ``masks`` to ``target``."""
    num_words = min(len(target), *(len(mask) for mask in masks))
    target[:num_words] = masks[0][:num_words]
    target[num_words:] = 0
    for mask in masks[1:]:
        target[:num_words] &= mask[:num_words]
