"""Clients of a cluster: streams that begin at a fixed rate, independent of earlier ones."""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from corun.runtime.tasks import cancel_all

OK, ERROR, REFUSED, SILENT = "ok", "error", "refused", "silent"
_ENGINE = re.compile(r"engine (\S+) ended before")
_DEADLINE_S = 60.0


@dataclass(slots=True)
class Outcome:
    """What came of one stream."""

    started_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    kind: str = SILENT  # it ended with neither [DONE] nor an error event
    message: str = ""  # of an error
    text: str = ""

    @property
    def engine(self) -> str | None:
        """Which engine an error event names."""
        found = _ENGINE.search(self.message)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.kind} after {self.ended_s - self.started_s:.2f} s: {self.message or self.text}"


async def one_stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Outcome:
    """Read a stream to its end."""
    path = "chat/completions" if "messages" in body else "completions"
    outcome = Outcome(time.monotonic())
    texts: list[str] = []
    try:
        async with (
            asyncio.timeout(_DEADLINE_S),
            session.post(f"{url}/v1/{path}", json=body | {"stream": True}) as response,
        ):
            if response.status != 200:
                outcome.kind = REFUSED
                outcome.message = f"{response.status} {(await response.text())[:300]}"
                return outcome
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if outcome.first_s is None:
                    outcome.first_s = time.monotonic()
                if line.startswith(b"data: [DONE]"):
                    outcome.kind = OK
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    outcome.kind, outcome.message = ERROR, event["error"]["message"]
                    break
                texts += [_text_of(choice) for choice in event["choices"]]
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        outcome.kind = SILENT if outcome.first_s is not None else REFUSED
        outcome.message = repr(error)
    finally:
        outcome.ended_s = time.monotonic()
        outcome.text = "".join(texts)
    return outcome


@dataclass(slots=True)
class Load:
    """Streams under way, and what came of those that have ended."""

    outcomes: list[Outcome] = field(default_factory=list)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def bad(self) -> list[Outcome]:
        """Those that did not end as they should."""
        return [one for one in self.outcomes if one.kind != OK]


@asynccontextmanager
async def load_of(
    url: str, rate_rps: float, make_body: Callable[[random.Random], dict[str, Any]], seed: int
) -> AsyncIterator[Load]:
    """Begin streams at even distances inside; wait for all of them after."""
    load, rng = Load(), random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def run(body: dict[str, Any]) -> None:
            load.outcomes.append(await one_stream(session, url, body))

        async def begin() -> None:
            next_s = time.monotonic()
            while True:
                task = asyncio.ensure_future(run(make_body(rng)))
                load.tasks.add(task)
                task.add_done_callback(load.tasks.discard)
                next_s += 1.0 / rate_rps
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))

        beginning = asyncio.ensure_future(begin())
        try:
            yield load
        finally:
            await cancel_all(beginning)
            if load.tasks:
                await asyncio.wait(load.tasks, timeout=_DEADLINE_S)


def body_maker(
    names: Sequence[str], num_prompt_tokens: int = 64, num_tokens: int = 32
) -> Callable[[random.Random], dict[str, Any]]:
    """Requests of any of these names."""

    def make(rng: random.Random) -> dict[str, Any]:
        return {
            "model": rng.choice(names),
            "max_tokens": num_tokens,
            "temperature": 0,
            "prompt": [rng.randrange(10, 1000) for _ in range(num_prompt_tokens)],
        }

    return make


def _text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""
