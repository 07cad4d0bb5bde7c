"""First come, first served, with prefetch of adapters: S-LoRA's order.

How far a request can be overtaken: see ``keyed``. The key is the arrival, so other requests pass
only while its adapter is being loaded: ``max_overtaking_tokens`` tokens and one more request.
"""

from collections.abc import Collection

from ..request import Request
from .keyed import KeyedPolicy


class FcfsPolicy(KeyedPolicy):
    """Admits by arrival; preempts the latest to arrive."""

    def _key_s(self, request: Request) -> float:
        return request.arrival_s

    def victim(self, running: Collection[Request]) -> Request:
        """Choose the request that arrived last."""
        return max(running, key=lambda request: (request.arrival_s, request.request_id))
