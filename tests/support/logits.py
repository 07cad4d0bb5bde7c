"""Random inputs of the sampler, and what they do by definition."""

import numpy as np
import torch
from numpy.typing import NDArray


class LogitCase:
    """Three rows of logits, masks of the rows 2 and 0, and entries of the rows 0 and 2."""

    def __init__(self, num_columns: int, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.logits = rng.standard_normal((3, num_columns)).astype(np.float32)
        num_words = -(-num_columns // 32)
        words = rng.integers(-(2**31), 2**31, (2, num_words), dtype=np.int64).astype(np.int32)
        words[rng.random(words.shape) < 0.3] = -1
        words[rng.random(words.shape) < 0.3] = 0
        self.masks = words
        self.mask_rows = np.array([2, 0], np.int32)
        columns = rng.integers(0, num_columns, 5)
        # A token twice, as one with a bias that is forbidden, and one beyond the vocabulary.
        self.entries = [
            (0, int(columns[0]), 2.5),
            (0, int(columns[1]), -np.inf),
            (0, int(columns[1]), 5.0),
            (2, int(columns[2]), -1.5),
            (1, num_columns + 3, 7.0),
            (2, num_columns, 7.0),
        ]

    def packed_entries(self) -> NDArray[np.int32]:
        """The entries as the kernels take them: int32 [3, entries]."""
        table = np.array(self.entries, np.float64).reshape(-1, 3).T
        return np.stack([*table[:2].astype(np.int32), table[2].astype(np.float32).view(np.int32)])

    def expected(self) -> NDArray[np.float32]:
        result = self.logits.copy()
        num_columns = result.shape[1]
        for row, words in zip(self.mask_rows, self.masks, strict=True):
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:num_columns]
            result[row, bits == 0] = -np.inf
        for row, column, value in self.entries:
            if column < num_columns:
                result[row, column] += np.float32(value)
        return result

    def tensors(self, device: str = "cpu") -> list[torch.Tensor]:
        """Logits, masks, their rows, and entries, as copies."""
        arrays = (self.logits, self.masks, self.mask_rows, self.packed_entries())
        return [torch.from_numpy(array.copy()).to(device) for array in arrays]
