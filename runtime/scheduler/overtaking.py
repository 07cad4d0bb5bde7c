"""Counts tokens that are admitted ahead of a waiting request, up to a bound. Pure."""

from collections.abc import Iterable

from ..plan import RequestId
from ..request import Request

# Requests that a step considers behind one that waits for a load. The cost of a step must
# not depend on how many requests wait.
MAX_PASSED_REQUESTS = 64


class Overtaking:
    """Overtaking tokens of each request, and their bound."""

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens``: the bound, in tokens (prompt and recomputed output)."""
        self._max_tokens = max_tokens
        self._num_tokens: dict[RequestId, int] = {}  # of requests that were overtaken

    def count(self, overtaken: Iterable[Request], num_tokens: int) -> None:
        """Count ``num_tokens`` tokens that were admitted before the ``overtaken`` requests."""
        for request in overtaken:
            request_id = request.request_id
            self._num_tokens[request_id] = self._num_tokens.get(request_id, 0) + num_tokens

    def close(self, request: Request) -> None:
        """Let no further request pass ``request``."""
        self._num_tokens[request.request_id] = self._max_tokens

    def is_at_bound(self, request: Request) -> bool:
        """Whether no further request may pass ``request``."""
        return self._num_tokens.get(request.request_id, 0) >= self._max_tokens

    def discard(self, request_id: RequestId) -> None:
        """Drop the count of a request that has ended."""
        self._num_tokens.pop(request_id, None)
