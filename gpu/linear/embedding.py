"""An embedding that reads its rows from the packed weight of the tied output head."""

import torch
from torch import nn

from .numba_backend import NumbaLinear


class TiedEmbedding(nn.Module):
    """Replaces an ``nn.Embedding``, so that the matrix is in memory only once."""

    def __init__(self, source: NumbaLinear) -> None:
        super().__init__()
        self._source = source

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [num_embeddings, features]; unpacked at each access."""
        return self._source.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Look up: int64 [...] -> [..., features]."""
        return self._source.rows(indices)


def plain_embeddings(model: nn.Module) -> dict[int, list[str]]:
    """Paths of embeddings by the identity of their weight, which a linear may share.

    Excludes subclasses, which may do more than look up.
    """
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Embedding and module.max_norm is None:
            paths.setdefault(id(module.weight), []).append(path)
    return paths
