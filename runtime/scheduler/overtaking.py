"""How many tokens were admitted before requests that others may pass for a while. Pure."""

from collections.abc import Iterable

from ..plan import RequestId
from ..request import Request

# Who waits for an adapter on its way is passed by others, of whom a step looks at so many: what a
# step costs must not depend on how many wait.
MAX_PASSED_REQUESTS = 64


class Overtaking:
    """Counts for each request; at the bound nobody may pass it any more."""

    def __init__(self, max_tokens: int) -> None:
        """``max_tokens``: the bound, in tokens (prompt and recomputed output)."""
        self._max_tokens = max_tokens
        self._num_tokens: dict[RequestId, int] = {}  # of requests that were overtaken

    def count(self, overtaken: Iterable[Request], num_tokens: int) -> None:
        """Note that ``num_tokens`` were admitted before those who were overtaken."""
        for request in overtaken:
            request_id = request.request_id
            self._num_tokens[request_id] = self._num_tokens.get(request_id, 0) + num_tokens

    def close(self, request: Request) -> None:
        """Let nobody pass ``request`` any more."""
        self._num_tokens[request.request_id] = self._max_tokens

    def is_at_bound(self, request: Request) -> bool:
        """Whether nobody may pass ``request`` any more."""
        return self._num_tokens.get(request.request_id, 0) >= self._max_tokens

    def discard(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._num_tokens.pop(request_id, None)
