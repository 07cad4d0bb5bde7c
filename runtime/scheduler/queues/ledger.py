"""The account of quotas: what each queue has left, who holds it, and whose it was. Pure.

Invariant: available + held = quota for every queue, where held includes what other queues have
borrowed. So the sums over all queues are the device's tokens.

Source: Chameleon, algorithm 1, which notes no lender: what is lent there is spent twice.
"""

from collections import Counter
from collections.abc import Sequence

from ...plan import RequestId


class QuotaLedger:
    """Tokens that requests hold, by the queues that they come from."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self.quotas = tuple(quotas)
        self.available = list(quotas)  # negative = overdrawn
        self._held: dict[RequestId, Counter[int]] = {}  # [request][queue]

    @property
    def free_tokens(self) -> int:
        """What nobody holds."""
        return sum(self.available)

    def is_idle(self, queue: int) -> bool:
        """Whether the queue has its whole quota: nobody holds or has borrowed any of it."""
        return self.available[queue] == self.quotas[queue]

    def spare(self, lenders: Sequence[int]) -> int:
        """What these queues could lend."""
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
        """Let a request hold more tokens: its queue's, then its lenders' in proportion.

        What both lack its own queue is overdrawn by. ``is_all_lent``: lenders come first.
        """
        spare = self.spare(lenders)
        own = 0 if is_all_lent else min(num_tokens, max(0, self.available[queue]))
        lent = min(num_tokens - own, spare)
        self._debit(request_id, queue, num_tokens - lent)
        for lender in lenders:
            available = max(0, self.available[lender])
            if available:
                share = -(-lent * available // spare)  # of the last one all that is left
                self._debit(request_id, lender, share)
                lent -= share
                spare -= available

    def refund(self, request_id: RequestId) -> None:
        """Return everything to the queues that it came from."""
        for queue, num_tokens in self._held.pop(request_id).items():
            self.available[queue] += num_tokens

    def check_invariants(self) -> None:
        """Assert that the account adds up."""
        held = sum(self._held.values(), Counter[int]())
        for queue, quota in enumerate(self.quotas):
            assert self.available[queue] + held[queue] == quota, (queue, quota, held)

    def _debit(self, request_id: RequestId, queue: int, num_tokens: int) -> None:
        """Move tokens from a queue to a request."""
        self._held.setdefault(request_id, Counter())[queue] += num_tokens
        self.available[queue] -= num_tokens
