"""Base of policies that order requests by a key, fixed at arrival. Pure.

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
from collections.abc import Collection, Generator, Sequence
from itertools import islice

from ..memory.grant import Verdict
from ..plan import RequestId
from ..request import Request
from .overtaking import MAX_PASSED_REQUESTS, Overtaking
from .policy import NO_ROOM, PolicyFacts
from .waiting_queue import WaitingQueue


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
