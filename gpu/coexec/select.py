"""Chooses how x is moved to workers and y back on a device."""

import torch

from .handover import AddByCopy, Exchange, Handover, StreamHandover
from .host_handover import HostHandover


def make_handover(exchange: Exchange, where: torch.device, *, max_tokens: int, max_columns: int) -> Handover:
    """``max_columns``: padded columns of all targets of the widest input group together."""
    if where.type == "cpu":
        return HostHandover(exchange)
    return StreamHandover(exchange, AddByCopy(max_tokens, max_columns, where))
