"""Predicts output lengths, for the reservations of admission and the order of policies. Pure."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from ..errors import ConfigError
from ..plan import AdapterId
from ..request import Request

Key = TypeVar("Key")

_MIN_ENDS = 20  # ended requests of an adapter before its own mean is used
_WINDOW = 500  # newest ended requests that count
_UNKNOWN_TOKENS = 256  # before any request has ended
_MAX_KEYS = 8192  # whose means are kept; each version of an adapter is a key


class OutputPredictor(Protocol):
    """Predicts output lengths. The scheduler limits predictions to the request's limit."""

    def predict(self, request: Request) -> int:
        """Return the predicted output tokens of a request that arrives now."""

    def ended(self, request: Request) -> None:
        """Learn from a request that has ended without an abort or an error."""


class _Lengths:
    """The mean of the newest lengths, in O(1)."""

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
    """The mean output length of a key's requests, or of all requests if the key has few."""

    def __init__(self) -> None:
        self._all = _Lengths()
        self._by_key: dict[Key, _Lengths] = {}  # newest end last

    def predict(self, key: Key) -> int:
        """Return the predicted output tokens of a request that arrives now."""
        own = self._by_key.get(key)
        if own is not None and len(own) >= _MIN_ENDS:
            return own.mean
        return self._all.mean if len(self._all) else _UNKNOWN_TOKENS

    def ended(self, key: Key, num_tokens: int) -> None:
        """Include a request that has ended without an abort or an error."""
        self._all.add(num_tokens)
        own = self._by_key[key] = self._by_key.pop(key, _Lengths())
        own.add(num_tokens)
        if len(self._by_key) > _MAX_KEYS:
            del self._by_key[next(iter(self._by_key))]


class HistoryPredictor:
    """Predicts the mean output length of requests for the same adapter."""

    def __init__(self) -> None:
        self._history = OutputHistory[AdapterId]()

    def predict(self, request: Request) -> int:
        return self._history.predict(request.adapter_id)

    def ended(self, request: Request) -> None:
        self._history.ended(request.adapter_id, request.num_output_tokens)


class LimitPredictor:
    """Predicts the request's limit: no preemptions, but much unused memory."""

    def predict(self, request: Request) -> int:
        return request.max_total_tokens - request.num_prompt_tokens

    def ended(self, request: Request) -> None:
        """Do nothing."""


OUTPUT_PREDICTORS: Mapping[str, Callable[[], OutputPredictor]] = {
    "history": HistoryPredictor,
    "limit": LimitPredictor,
}


def make_predictor(name: str) -> OutputPredictor:
    """Return a new predictor. Raises ``ConfigError`` for an unknown name."""
    try:
        return OUTPUT_PREDICTORS[name]()
    except KeyError:
        known = ", ".join(sorted(OUTPUT_PREDICTORS))
        raise ConfigError(f"--output-predictor is {name!r}, must be one of: {known}") from None
