"""Assigns planned parts to servers so that the fewest bytes are copied. Pure."""

import math
from collections.abc import Mapping, Sequence

from ....errors import ConfigError
from ..reports import ServerId, Shares
from .plan import StoreServer

# Weight of a changed share against a byte: it only breaks ties between equal copies.
_SHARE_WEIGHT = 1e-6


def least_copied(
    parts: Sequence[Mapping[str, float]], servers: Sequence[StoreServer], previous: Shares,
    num_bytes: Mapping[str, int],
) -> list[ServerId]:  # fmt: skip
    """Return the server of each part: one part (shares by adapter) for each server.

    This is an assignment problem over the bytes to copy (LoRAServe, algorithm 1, step 5). Raises
    ``ConfigError`` if scipy is not installed.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ConfigError(
            "this placement needs scipy: pip install 'corun[cluster]', or choose another by "
            "--placement"
        ) from None
    costs = [[_cost(part, server, previous, num_bytes) for server in servers] for part in parts]
    _, columns = linear_sum_assignment(costs)
    return [servers[column].server_id for column in columns]


def _cost(
    part: Mapping[str, float], server: StoreServer, previous: Shares, num_bytes: Mapping[str, int]
) -> float:
    if sum(num_bytes[name] for name in part) > server.store_bytes:
        return math.inf
    cost = 0.0
    for name, share in part.items():
        before = previous.get(name, {}).get(server.server_id)
        if before is None:
            cost += num_bytes[name]
        else:
            cost += _SHARE_WEIGHT * abs(share - before)
    return cost
