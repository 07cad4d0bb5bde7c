"""By arrival, with a bounded advantage of short prompts; within the step short prompts first.

How far a request can be overtaken: see ``keyed``. It is passed by those with shorter prompts that
arrive within W min(1, prompt / mean prompt) seconds of it: at most the tokens that come in that
time, and ``max_overtaking_tokens`` and one request while its adapter is being loaded. W is 8 times
the SLO of the first token.

Within a step (``prefill_order``) a running request's chunk waits for those with less left to
compute, at most as long as 15 times what a mean prompt takes; admission does not depend on it.
"""

from collections.abc import Sequence

from ..request import Request
from .keyed import KeyedPolicy
from .means import RunningMean
from .policy import PolicyFacts
from .prefill_order import ShortPrefillFirst

_SLOWDOWN = 5.0  # SLO of a first token, in times of an idle engine's
_WINDOW_SLOS = 8.0  # W


class CorunPolicy(KeyedPolicy):
    """Admits by arrival + W min(1, prompt tokens / mean prompt tokens)."""

    def __init__(self, facts: PolicyFacts) -> None:
        super().__init__(facts)
        self._slo_ttft_s = facts.slo_ttft_s
        self._mean_tokens = RunningMean()
        self._prefill_order = ShortPrefillFirst(facts.times)

    def ended(self, request: Request, now_s: float) -> None:
        super().ended(request, now_s)
        self._prefill_order.discard(request.request_id)

    def prefill_order(self, requests: list[Request], now_s: float) -> Sequence[Request]:
        return self._prefill_order.sorted(requests)

    def _key_s(self, request: Request) -> float:
        num_tokens = request.num_uncached_prompt_tokens
        self._mean_tokens.add(num_tokens)
        self._prefill_order.arrived(request)
        slo_s = self._slo_ttft_s or _SLOWDOWN * self._prefill_order.mean_s
        share = min(1.0, num_tokens / self._mean_tokens.value)
        return request.arrival_s + _WINDOW_SLOS * slo_s * share
