"""Policies that order requests by a key, fixed at arrival: their base, FCFS and SJF. Pure.

How far a request can be overtaken, apart from the difference of keys:

- No request with a larger key passes one that lacks memory.
- A request that waits for its adapter's load is passed by requests that can run, at most 64 a step.
  This ends when ``max_overtaking_tokens`` tokens (prompt and recomputed output) have been admitted
  before it, summed over all its loads. Only the last request that passes may exceed the bound.
- A key is a time in seconds, at or after the arrival of its request. Requests that arrive after
  this time have larger keys. Before it, any number of requests may arrive that have smaller keys
  and pass.

A preempted request keeps its key.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Generator, Iterable, Sequence
from itertools import islice

from ..memory.grant import Verdict
from ..plan import RequestId
from ..request import Request
from .policy import NO_ROOM, PolicyFacts
from .waiting_queue import WaitingQueue

# Requests that a step considers behind one that waits for a load. The cost of a step must
# not depend on how many requests wait.
MAX_PASSED_REQUESTS = 64
_AGEING_S_PER_TOKEN = 0.02  # of shortest job first; about the time of one token


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
        self._num_tokens.pop(request_id, None)


class KeyedPolicy(ABC):
    """Admits the smallest key first; preempts the latest admitted request."""

    def __init__(self, facts: PolicyFacts) -> None:
        self._waiting = WaitingQueue()
        self._keys: dict[RequestId, float] = {}  # of requests that have not ended
        self._overtaking = Overtaking(facts.max_overtaking_tokens)

    @abstractmethod
    def _key_s(self, request: Request) -> float:
        """Return the key of a request that arrives, which is at least its arrival."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, now_s: float) -> None:
        key_s = self._keys.get(request.request_id)
        if key_s is None:
            key_s = self._keys[request.request_id] = self._key_s(request)
        self._waiting.add(request, key_s)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def ended(self, request: Request, now_s: float) -> None:
        del self._keys[request.request_id]
        self._overtaking.discard(request.request_id)

    def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
        """Offer requests by key. A request that lacks memory blocks those behind it."""
        passed: list[Request] = []
        for request in self._waiting:
            verdict = yield request
            if verdict in NO_ROOM:
                return
            if verdict is Verdict.LOADING:
                passed.append(request)
                is_blocked = self._overtaking.is_at_bound(request)
            else:
                self.remove(request)
                self._overtaking.count(passed, request.num_known_tokens)
                is_blocked = any(map(self._overtaking.is_at_bound, passed))
            if is_blocked or len(passed) == MAX_PASSED_REQUESTS:
                return

    def upcoming(self, max_requests: int) -> Sequence[Request]:
        return list(islice(self._waiting, max_requests))

    def prefill_order(self, requests: list[Request], now_s: float) -> Sequence[Request]:
        """Keep the order of admission."""
        return requests

    def squash(self, running: Collection[Request], now_s: float) -> Collection[Request]:
        return ()

    def wake_at_s(self) -> float | None:
        return None

    def victim(self, running: Collection[Request]) -> Request:
        """Choose the latest admitted request."""
        return deque(running, maxlen=1).pop()


class FcfsPolicy(KeyedPolicy):
    """Admits by arrival; preempts the latest to arrive. S-LoRA's order.

    Other requests pass one only while its adapter is being loaded: ``max_overtaking_tokens`` tokens
    and one more request.
    """

    def _key_s(self, request: Request) -> float:
        return request.arrival_s

    def victim(self, running: Collection[Request]) -> Request:
        """Choose the request that arrived last."""
        return max(running, key=lambda request: (request.arrival_s, request.request_id))


class SjfPolicy(KeyedPolicy):
    """Admits by arrival + 20 ms per predicted output token: shortest job first, with ageing.

    Shorter requests pass one if they arrive within 20 ms per predicted output token after it. While
    its adapter is being loaded, other requests pass it, too: ``max_overtaking_tokens`` tokens and
    one more request.

    Source: Chameleon, section 5.3, compares with uServe's order. Ageing is not defined there.
    """

    def _key_s(self, request: Request) -> float:
        return request.arrival_s + _AGEING_S_PER_TOKEN * request.num_predicted_output_tokens
