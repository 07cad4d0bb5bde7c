"""Rotary embeddings with frequencies that depend on a sequence's length, in a packed row.

``longrope`` uses its long factors as soon as the longest position of the *call* passes the original
context, so in a packed row one request would change another's keys. The guard calls the module once
for the rows below the limit and once for those above. A request that crosses the limit must be
recomputed from its first token; the scheduler is given this length.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from ..forward.batch import StepContext
from ..forward.launcher import current_launcher


def rope_recompute_length(model: nn.Module) -> int | None:
    """Known tokens at which a request's KV becomes invalid, or None if it never does."""
    limits = {_original_length(module) for _, module in _rotary_modules(model, "longrope")}
    return min(limits) + 1 if limits else None


def rope_max_length(model: nn.Module) -> int | None:
    """Longest context for which ``dynamic`` rotary embeddings keep their frequencies."""
    limits = {int(cast(int, module.original_max_seq_len)) for _, module in _rotary_modules(model, "dynamic")}
    return min(limits) if limits else None


def guard_longrope(model: nn.Module, context: StepContext) -> int:
    """Make every ``longrope`` module decide per request. Returns how many were guarded."""
    guarded = 0
    for _, module in _rotary_modules(model, "longrope"):
        module.forward = _PerRequestRope(module.forward, _original_length(module), context)
        guarded += 1
    return guarded


class _PerRequestRope:
    """Replaces one rotary module's ``forward``."""

    def __init__(self, forward: Any, original_length: int, context: StepContext) -> None:
        self._forward = forward
        self._original_length = original_length
        self._context = context

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        current_launcher().refuse("rotary embeddings depend on the lengths of requests")
        known_lens = self._context.known_lens_host
        if self._context.attention is None:  # a plain pass, one sequence per call
            return self._forward(x, position_ids, *args, **kwargs)  # type: ignore[no-any-return]
        is_long = [length > self._original_length for length in known_lens]
        if not any(is_long):
            return self._forward(x, position_ids, *args, **kwargs)  # type: ignore[no-any-return]
        cos_long, sin_long = self._long(x, position_ids, args, kwargs)
        if all(is_long):
            return cos_long, sin_long
        starts = self._context.attention.query_starts_host
        mask = torch.zeros(position_ids.shape[-1], dtype=torch.bool, device=x.device)
        for row, long in enumerate(is_long):
            mask[starts[row] : starts[row + 1]] = long
        # Positions of long rows would switch the factors; their values here are discarded.
        short_positions = position_ids.masked_fill(mask, 0)
        cos_short, sin_short = self._forward(x, short_positions, *args, **kwargs)
        select = mask[None, :, None]
        return torch.where(select, cos_long, cos_short), torch.where(select, sin_long, sin_short)

    def _long(
        self, x: torch.Tensor, position_ids: torch.Tensor, args: Any, kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call with an extra last position beyond the limit, and remove it from the result."""
        beyond = position_ids.new_full((position_ids.shape[0], 1), self._original_length)
        cos, sin = self._forward(x, torch.cat([position_ids, beyond], dim=1), *args, **kwargs)
        return cos[:, :-1], sin[:, :-1]


def _rotary_modules(model: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules with a ``rope_type`` (a string, or one per layer type) that contains ``kind``."""
    for name, module in model.named_modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
        if any(isinstance(item, str) and kind in item for item in kinds):
            yield name, module


def _original_length(module: nn.Module) -> int:
    """The context of the original training, as the module itself compares it."""
    parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    lengths = [item.get("original_max_position_embeddings") for item in nested or [parameters]]
    return min(int(length) for length in lengths if length is not None)
