"""Measures first tokens and decode steps of one server, as its client.

Times are measured by the client, without the round trip of a request.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec
import numpy as np

from ....profiles.curve import median
from ....profiles.profile import ProfileError
from ...server.errors import HttpError
from ..engine_types.vllm_translation import vllm_refusal
from ..http.calls import fetch

_COMPLETIONS_PATH = "/v1/completions"
_ROUND_TRIP_PATH = "/version"
_NUM_ROUND_TRIPS = 9
_ANSWER_TIMEOUT_S = 120.0
STEPS = 24  # with all rows decoding; enough for a median
_EVENT = b"data: {"


class _Request(msgspec.Struct, frozen=True):
    """A completion of random tokens, which are in no prefix cache."""

    model: str
    prompt: list[int]
    max_tokens: int
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0


class ServerBench:
    """Measures one server, which has no other clients."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, vocab_size: int, seed: int
    ) -> None:
        self._session = session
        self._url = url
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._round_trip_s = 0.0

    async def begin(self) -> None:
        """Measure the round trip of a request."""
        times_s = []
        for _ in range(_NUM_ROUND_TRIPS):
            started_s = time.perf_counter()
            url = self._url + _ROUND_TRIP_PATH
            await fetch(self._session, url, None, timeout_s=_ANSWER_TIMEOUT_S)
            times_s.append(time.perf_counter() - started_s)
        self._round_trip_s = median(times_s)

    async def first_token_s(self, model: str, num_tokens: int) -> float:
        """Return the time to the first token of one prompt without other load."""
        started_s = time.perf_counter()
        arrivals_s = await self._arrivals(model, num_tokens, max_tokens=1)
        return max(arrivals_s[0] - started_s - self._round_trip_s, 1e-6)

    async def step_s(self, model: str, num_rows: int, context_tokens: int) -> float:
        """Return the time of a step with ``num_rows`` decoding requests, each with this context."""
        max_tokens = STEPS + 2 * num_rows  # the first rows go on while the last ones start
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._arrivals(model, context_tokens, max_tokens))
                for _ in range(num_rows)
            ]
        rows = [task.result() for task in tasks]
        begin_s = max(row[1] for row in rows)
        end_s = min(row[-1] for row in rows)
        gaps_s = [gap_s for row in rows for gap_s in _gaps(row, begin_s, end_s)]
        if not gaps_s:
            raise ProfileError(
                f"{num_rows} requests never decode at once: the server takes fewer, or has other "
                "clients"
            )
        return median(gaps_s)

    async def _arrivals(self, model: str, num_tokens: int, max_tokens: int) -> Sequence[float]:
        """Return the arrival times of all tokens. Raises ``HttpError`` if the server refuses."""
        prompt = self._rng.integers(0, self._vocab_size, num_tokens).tolist()
        body = _Request(model=model, prompt=prompt, max_tokens=max_tokens)
        arrivals_s = [arrival_s async for arrival_s in self._stream(body)]
        if len(arrivals_s) < min(max_tokens, 2):
            raise ProfileError(f"{self._url} ended a stream after {len(arrivals_s)} tokens")
        return arrivals_s

    async def _stream(self, body: _Request) -> AsyncIterator[float]:
        url = self._url + _COMPLETIONS_PATH
        headers = {"Content-Type": "application/json"}
        data = msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(_ANSWER_TIMEOUT_S),
                self._session.post(url, data=data, headers=headers) as response,
            ):
                if response.status >= 400:
                    raise vllm_refusal(url, response.status, await response.read())
                while line := await response.content.readline():
                    if line.startswith(_EVENT):
                        if b'"error"' in line[: len(_EVENT) + 10]:
                            raise ProfileError(f"{url} fails: {line.decode().strip()[:200]}")
                        yield time.perf_counter()
        except TimeoutError:
            raise ProfileError(f"{url} did not answer within {_ANSWER_TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise HttpError(503, f"{url} cannot be read: {error}", code="unreachable") from None


def _gaps(row: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Return times between a row's tokens while all rows decode."""
    return [b - a for a, b in itertools.pairwise(row) if a >= begin_s and b <= end_s]
