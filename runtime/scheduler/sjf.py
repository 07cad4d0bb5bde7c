"""Shortest job first by predicted output, with ageing: uServe's order.

How far a request can be overtaken: see ``keyed``. It is passed by the shorter ones that arrive
within 20 ms per predicted output token of it: at most the tokens that come in that time, and
``max_overtaking_tokens`` and one request while its adapter is being loaded.

Source: Chameleon, section 5.3, compares with uServe's order; how a request ages is defined nowhere.
"""

from ..request import Request
from .keyed import KeyedPolicy

_AGEING_S_PER_TOKEN = 0.02  # about what a token takes: who has waited that long is as short


class SjfPolicy(KeyedPolicy):
    """Admits by arrival + 20 ms per predicted output token."""

    def _key_s(self, request: Request) -> float:
        return request.arrival_s + _AGEING_S_PER_TOKEN * request.num_predicted_output_tokens
