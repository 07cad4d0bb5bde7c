"""Order of arrival with a bounded advantage for short prompts. Short prompts first within a step.

How far a request can be overtaken: see ``keyed``. Requests with shorter prompts pass it if they
arrive within W min(1, its prompt / mean prompt) seconds after it. Prompts count without their
cached tokens. W is 8 times the SLO of the first token. While its adapter is being loaded, other
requests pass it, too: ``max_overtaking_tokens`` tokens and one more request.

Within a step (``prefill_order``) chunks of requests with less left to compute come first. A chunk
waits for them at most 15 times the prefill time of a mean prompt. Admission does not depend on this
order.
"""

from collections.abc import Sequence

from ..request import Request
from .keyed import KeyedPolicy
from .policy import PolicyFacts
from .prefill_order import RunningMean, ShortPrefillFirst

_SLOWDOWN = 5.0  # SLO of a first token over the time on an idle engine
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
