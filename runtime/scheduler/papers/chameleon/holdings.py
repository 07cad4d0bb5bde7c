"""Tokens of quota that running requests and their adapters are charged. Pure.

A request is charged its prompt and a share of its predicted output, or its known tokens once they
are more. An adapter is charged once: to the first running request that uses it, and to the next one
when that request ends.

Source: Chameleon, section 4.2, which charges all of the output, and the adapter with each request.
But requests grow token by token and end at different times, so memory holds more requests than it
would if each had its complete output. And with grouped-query attention an adapter of rank 64 on all
linears is as large as the KV of 2,560 tokens, too much to charge with each request.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ....plan import AdapterId, RequestId
from ....request import Request
from .quotas import QuotaLedger

_GROWTH_TOKENS = 16  # charged at once


@dataclass(slots=True, eq=False)
class Holding:
    """A running request."""

    request: Request
    queue: int
    num_tokens: int  # charged, without the adapter
    admitted_s: float


class Holdings:
    """Running requests in order of admission, and the ledger of quotas."""

    def __init__(self, quotas: Sequence[int], bytes_per_token: float, output_share: float) -> None:
        """``bytes_per_token``: of KV. ``output_share``: part of predictions that is charged."""
        self.ledger = QuotaLedger(quotas)
        self._bytes_per_token = bytes_per_token
        self._output_share = output_share
        self._holdings: dict[RequestId, Holding] = {}
        self._users: dict[AdapterId, dict[RequestId, None]] = {}  # the first one is charged

    def __len__(self) -> int:
        return len(self._holdings)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._holdings

    @property
    def requests(self) -> Iterable[Request]:
        """Running requests in order of admission."""
        return (holding.request for holding in self._holdings.values())

    def size_tokens(self, request: Request) -> int:
        """Return the charge of a request and its adapter."""
        return self._kv_tokens(request) + self.adapter_tokens(request)

    def need_tokens(self, request: Request) -> int:
        """Return what a waiting request would be charged now."""
        is_charged = request.adapter_id in self._users
        return self._kv_tokens(request) + (0 if is_charged else self.adapter_tokens(request))

    def adapter_tokens(self, request: Request) -> int:
        """Return the size of a request's adapter in tokens of KV."""
        return math.ceil(request.adapter_bytes / self._bytes_per_token)

    def freed_tokens(self, request: Request) -> int:
        """Return what the end of a running request frees on the device."""
        is_last = len(self._users[request.adapter_id]) == 1
        num_tokens = self._holdings[request.request_id].num_tokens
        return num_tokens + (self.adapter_tokens(request) if is_last else 0)

    def start(
        self, request: Request, queue: int, lenders: Sequence[int], now_s: float, *, is_all_lent: bool = False
    ) -> None:
        """Charge a request that was admitted; see ``QuotaLedger.charge``."""
        num_tokens = self.need_tokens(request)
        self.ledger.charge(request.request_id, queue, num_tokens, lenders, is_all_lent=is_all_lent)
        self._users.setdefault(request.adapter_id, {})[request.request_id] = None
        self._holdings[request.request_id] = Holding(request, queue, self._kv_tokens(request), now_s)

    def stop(self, request: Request) -> Holding:
        """Refund a request, and charge its adapter to the next running request that uses it."""
        holding = self._holdings.pop(request.request_id)
        self.ledger.refund(request.request_id)
        users = self._users[request.adapter_id]
        was_charged = next(iter(users)) == request.request_id
        del users[request.request_id]
        if not users:
            del self._users[request.adapter_id]
        elif was_charged:
            next_user = self._holdings[next(iter(users))]
            self._charge(next_user, self.adapter_tokens(request))
        return holding

    def grow(self) -> None:
        """Charge requests that have exceeded their charge, even if that overdraws their queues."""
        for holding in self._holdings.values():
            num_more = holding.request.num_known_tokens - holding.num_tokens
            if num_more > 0:
                num_more = max(num_more, _GROWTH_TOKENS)
                holding.num_tokens += num_more
                self._charge(holding, num_more)

    def recut(self, quotas: Sequence[int], queue_of: Callable[[Request], int]) -> None:
        """Charge all requests to the new queues, without loans. Queues may be overdrawn."""
        self.ledger = QuotaLedger(quotas)
        for holding in self._holdings.values():
            request = holding.request
            holding.queue = queue_of(request)
            is_charged = next(iter(self._users[request.adapter_id])) == request.request_id
            adapter_tokens = self.adapter_tokens(request) if is_charged else 0
            self._charge(holding, holding.num_tokens + adapter_tokens)

    def _charge(self, holding: Holding, num_tokens: int) -> None:
        self.ledger.charge(holding.request.request_id, holding.queue, num_tokens)

    def _kv_tokens(self, request: Request) -> int:
        """Return the charge of a request without its adapter."""
        share = math.ceil(self._output_share * request.num_predicted_output_tokens)
        return max(request.num_prompt_tokens + share, request.num_known_tokens)
