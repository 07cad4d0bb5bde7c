"""Embeddings of tokens: from the packed weight of the tied output head, and with adapters."""

from collections.abc import Hashable

import torch
from torch import nn

from ...runtime.adapters.target_map import Target
from ..forward.batch import StepContext
from ..forward.launcher import current_launcher
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


class AdaptedEmbedding(nn.Module):
    """Replaces the embedding of tokens: a look-up, and the deltas of adapters."""

    def __init__(
        self, base: nn.Module, context: StepContext, key: Hashable, target: Target
    ) -> None:
        """``base``: an ``nn.Embedding``, which may scale its rows, or its replacement."""
        super().__init__()
        self._base = base
        self._context = context
        self._key = key
        self._target_index = target.index
        self._last_token = target.num_tokens - 1
        scale = getattr(base, "embed_scale", None)
        self._scale = None if scale is None else torch.as_tensor(scale)

    @property
    def weight(self) -> torch.Tensor:
        """The base's matrix [num_embeddings, features]; may be unpacked at each access."""
        weight = self._base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up: int64 [1, tokens] -> [1, tokens, features]."""
        y: torch.Tensor
        if self._context.embedding_deltas is None:
            y = self._base(token_ids)
            return y
        known = token_ids.clamp(max=self._last_token)  # others are an adapter's own
        y = self._base(known)
        if self._scale is None:
            self._change(token_ids, y)
            return y
        before = nn.functional.embedding(known, self.weight)
        rows = before.clone()
        self._change(token_ids, rows)
        is_changed = (rows != before).any(-1, keepdim=True)
        return torch.where(is_changed, rows * self._scale.to(y), y)

    def _change(self, token_ids: torch.Tensor, y: torch.Tensor) -> None:
        rows = y.view(-1, y.shape[-1])
        current_launcher().call_in_every_pass(lambda: self._add(token_ids.view(-1), rows))

    def _add(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        deltas = self._context.embedding_deltas
        assert deltas is not None
        deltas.add(self._key, token_ids, (rows,), (self._target_index,))


def plain_embeddings(model: nn.Module) -> dict[int, list[str]]:
    """Paths of embeddings by the identity of their weight, which a linear may share.

    Excludes subclasses, which may do more than look up.
    """
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Embedding and module.max_norm is None:
            paths.setdefault(id(module.weight), []).append(path)
    return paths
