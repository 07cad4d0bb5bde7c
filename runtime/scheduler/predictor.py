"""How many tokens a request will put out: what admission reserves and policies order by. Pure."""

import itertools
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from ..errors import ConfigError
from ..plan import AdapterId, RequestId
from ..request import Request

_MIN_ENDS = 20  # of an adapter's own requests, before they are believed
_WINDOW = 500  # newest ends that count
_UNKNOWN_TOKENS = 256  # while nothing has ended
_NUM_BUCKETS = 5


Key = TypeVar("Key")


class OutputPredictor(Protocol):
    """Predicts when a request arrives; the scheduler cuts it to the request's limit."""

    def predict(self, request: Request) -> int:
        """Output tokens of a request that arrives now."""
        ...

    def ended(self, request: Request) -> None:
        """A request has ended by itself."""
        ...


class _Lengths:
    """Mean of the newest lengths, in O(1)."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque()
        self._total = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, num_tokens: int) -> None:
        self._lengths.append(num_tokens)
        self._total += num_tokens
        if len(self._lengths) > _WINDOW:
            self._total -= self._lengths.popleft()

    @property
    def mean(self) -> int:
        return round(self._total / len(self._lengths))


class OutputHistory(Generic[Key]):
    """The mean of what requests of a key came to, of all while these are few."""

    def __init__(self) -> None:
        self._all = _Lengths()
        self._by_key: dict[Key, _Lengths] = {}

    def predict(self, key: Key) -> int:
        """Output tokens of a request that arrives now."""
        own = self._by_key.get(key)
        if own is not None and len(own) >= _MIN_ENDS:
            return own.mean
        return self._all.mean if len(self._all) else _UNKNOWN_TOKENS

    def ended(self, key: Key, num_tokens: int) -> None:
        """A request has ended by itself."""
        self._all.add(num_tokens)
        self._by_key.setdefault(key, _Lengths()).add(num_tokens)


class HistoryPredictor:
    """What requests for the same adapter came to."""

    def __init__(self) -> None:
        self._history = OutputHistory[AdapterId]()

    def predict(self, request: Request) -> int:
        return self._history.predict(request.adapter_id)

    def ended(self, request: Request) -> None:
        self._history.ended(request.adapter_id, request.num_output_tokens)


class LimitPredictor:
    """As much as the request may put out: nothing is ever preempted, and much memory lies idle."""

    def predict(self, request: Request) -> int:
        return request.max_total_tokens - request.num_prompt_tokens

    def ended(self, request: Request) -> None:
        """Nothing is learned."""


class OraclePredictor:
    """Knows the true lengths, as well as it is told to.

    ``accuracy`` is the probability that the bucket is right, of five with as many requests each; a
    wrong one is a neighbour. What is predicted is the bucket's mean, so even a right bucket does
    not give the length away.

    Source: the buckets are those of uServe's proxy model (Chameleon, section 4.2); how accuracy is
    meant is not defined there.
    """

    def __init__(
        self, output_tokens: Mapping[RequestId, int], accuracy: float, rng: random.Random
    ) -> None:
        """``output_tokens``: of all requests to come. Raises ``ConfigError``."""
        if not 0.0 <= accuracy <= 1.0:
            raise ConfigError(f"the accuracy of the oracle is {accuracy}, must be from 0 to 1")
        self._output_tokens = output_tokens
        self._accuracy = accuracy
        self._rng = rng
        self._buckets = _buckets(sorted(output_tokens.values()))
        self._uppers = [bucket[-1] for bucket in self._buckets[:-1]]

    def predict(self, request: Request) -> int:
        return self.predicted(request.request_id)

    def predicted(self, request_id: RequestId) -> int:
        """What it says of this one, drawn anew each time."""
        length = self._output_tokens[request_id]
        index = bisect_left(self._uppers, length)
        if self._rng.random() >= self._accuracy:
            neighbours = [one for one in (index - 1, index + 1) if 0 <= one < len(self._buckets)]
            index = self._rng.choice(neighbours or [index])
        bucket = self._buckets[index]
        return round(sum(bucket) / len(bucket))

    def ended(self, request: Request) -> None:
        """It knew."""


def _buckets(lengths: Sequence[int]) -> list[Sequence[int]]:
    """Cut sorted lengths into buckets of as many each; fewer than asked for if there are few."""
    edges = sorted({len(lengths) * index // _NUM_BUCKETS for index in range(_NUM_BUCKETS + 1)})
    return [lengths[start:end] for start, end in itertools.pairwise(edges)]


OUTPUT_PREDICTORS: Mapping[str, Callable[[], OutputPredictor]] = {
    "history": HistoryPredictor,
    "limit": LimitPredictor,
}


def make_predictor(name: str) -> OutputPredictor:
    """Return a new predictor. Raises ``ConfigError`` if there is none of this name."""
    try:
        return OUTPUT_PREDICTORS[name]()
    except KeyError:
        known = ", ".join(sorted(OUTPUT_PREDICTORS))
        raise ConfigError(f"--output-predictor is {name!r}, must be one of: {known}") from None
