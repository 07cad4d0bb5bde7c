"""Determines which tokens an attention mask of transformers shows, from its index function.

No mask is built: the function is evaluated at indices on both sides of every edge, so the length
of a window or a chunk costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...runtime.errors import ModelError

# Of batch, head, query and key, which broadcast; True where the query sees the key.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_NUM_PERIODS = 4  # periods of a window or chunk with evaluated edges
_MAX_POSITION_BITS = 24


@dataclass(frozen=True, slots=True)
class Sight:
    """Which earlier tokens a causal layer sees."""

    window: int | None = None  # this many last positions, including its own
    chunk: int | None = None  # positions from the last multiple of this number on


class _NotOfPositionsError(ModelError):
    """The mask also depends on tensors of a pass."""


def read_mask(mask: MaskFunction, local_size: int | None, device: str = "cpu") -> Sight:
    """Find the ``Sight`` that ``mask`` describes.

    ``local_size``: the size of the mask's window or chunk according to transformers, or None.
    ``device``: the model's. On "meta", where tensors have no values, a mask that depends on tensors
    is treated as a chunk of that size.

    Raises ``ModelError`` if the mask is neither causal, nor a causal window or chunk of that size.
    """
    with torch.device("cpu" if device == "meta" else device):
        try:
            return _read_mask(mask, local_size)
        except _NotOfPositionsError:
            if device != "meta" or local_size is None:
                raise
            return Sight(chunk=local_size)


def _read_mask(mask: MaskFunction, local_size: int | None) -> Sight:
    query, key = (edges[:, None] for edges in (_edges(local_size), _edges(local_size)))
    key = key.T
    zero = torch.zeros((), dtype=torch.int64)
    try:
        seen = mask(zero, zero, query, key).broadcast_to(query.shape[0], key.shape[1])
    except (IndexError, RuntimeError, ValueError) as error:
        raise _NotOfPositionsError(
            f"its attention mask is not a function of positions ({error})"
        ) from error
    causal = key <= query
    if torch.equal(seen, causal):
        return Sight()
    if local_size is not None:
        if torch.equal(seen, causal & (key > query - local_size)):
            return Sight(window=local_size)
        if torch.equal(seen, causal & (key // local_size == query // local_size)):
            return Sight(chunk=local_size)
    raise ModelError("its attention mask is neither causal nor a causal window or chunk")


def _edges(local_size: int | None) -> torch.Tensor:
    """Positions next to powers of two and to multiples of ``local_size``: int64 [positions]."""
    centres = [2**bits for bits in range(_MAX_POSITION_BITS)]
    if local_size is not None:
        centres += [local_size * i for i in range(_NUM_PERIODS)]
    near = {centre + offset for centre in centres for offset in (-1, 0, 1)}
    return torch.tensor(sorted(position for position in near if position >= 0))
