"""Shortest job first by predicted output, with ageing: uServe's order.

How far a request can be overtaken: see ``keyed``. Shorter requests pass it if they arrive within
20 ms per predicted output token after it. While its adapter is being loaded, other requests pass
it, too: ``max_overtaking_tokens`` tokens and one more request.

Source: Chameleon, section 5.3, compares with uServe's order. Ageing is not defined there.
"""

from ..request import Request
from .keyed import KeyedPolicy

_AGEING_S_PER_TOKEN = 0.02  # about the time of one token


class SjfPolicy(KeyedPolicy):
    """Admits by arrival + 20 ms per predicted output token."""

    def _key_s(self, request: Request) -> float:
        return request.arrival_s + _AGEING_S_PER_TOKEN * request.num_predicted_output_tokens
