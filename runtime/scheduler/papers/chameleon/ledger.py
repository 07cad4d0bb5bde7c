"""The ledger of quotas: tokens available in each queue, and tokens charged to requests. Pure.

Invariant: available + charged = quota for each queue. Charged tokens include loans to other queues.

Source: Chameleon, algorithm 1, which does not record lenders, so that loans are spent twice.
"""

from collections import Counter
from collections.abc import Sequence

from ....plan import RequestId


class QuotaLedger:
    """Tokens charged to requests, by the queues that they come from."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self.quotas = tuple(quotas)
        self.available = list(quotas)  # negative = overdrawn
        self._charged: dict[RequestId, Counter[int]] = {}  # [request][queue]

    @property
    def free_tokens(self) -> int:
        """Tokens that no request is charged."""
        return sum(self.available)

    def is_idle(self, queue: int) -> bool:
        """Whether the whole quota of the queue is available."""
        return self.available[queue] == self.quotas[queue]

    def spare(self, lenders: Sequence[int]) -> int:
        """Return the tokens that these queues can lend."""
        return sum(max(0, self.available[queue]) for queue in lenders)

    def charge(
        self,
        request_id: RequestId,
        queue: int,
        num_tokens: int,
        lenders: Sequence[int] = (),
        *,
        is_all_lent: bool = False,
    ) -> None:
        """Charge tokens to a request: from its own queue, then from lenders in proportion.

        If both have too few, the own queue is overdrawn. ``is_all_lent``: lenders come first.
        """
        spare = self.spare(lenders)
        own = 0 if is_all_lent else min(num_tokens, max(0, self.available[queue]))
        lent = min(num_tokens - own, spare)
        self._debit(request_id, queue, num_tokens - lent)
        for lender in lenders:
            available = max(0, self.available[lender])
            if available:
                share = -(-lent * available // spare)  # the last lender gives the rest
                self._debit(request_id, lender, share)
                lent -= share
                spare -= available

    def refund(self, request_id: RequestId) -> None:
        """Return all tokens of a request to the queues that they came from."""
        for queue, num_tokens in self._charged.pop(request_id).items():
            self.available[queue] += num_tokens

    def check_invariants(self) -> None:
        """Assert the invariant for each queue."""
        charged = sum(self._charged.values(), Counter[int]())
        for queue, quota in enumerate(self.quotas):
            assert self.available[queue] + charged[queue] == quota, (queue, quota, charged)

    def _debit(self, request_id: RequestId, queue: int, num_tokens: int) -> None:
        """Move tokens from a queue to a request."""
        self._charged.setdefault(request_id, Counter())[queue] += num_tokens
        self.available[queue] -= num_tokens
