"""Streams and health checks against a server, with the longest gaps between their answers.

A process of its own, so that what its parent does beside it is not measured. Each line on stdin is
answered with a line of JSON: what was seen since the last one. Arguments: URL, number of streams.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_HEALTH_EVERY_S = 0.02
_ANSWER_S = 60.0


@dataclass
class Gaps:
    """What was seen for a time."""

    stream_s: float = 0.0  # longest time without an event of a stream, up to now
    health_s: float = 0.0  # longest answer of /health, or time without one, up to now
    noise_s: float = 0.0  # longest delay of this process itself
    num_events: int = 0
    num_failed: int = 0  # streams and health checks without the right answer


class _Probe:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.seen = Gaps()
        self._last_s: dict[int, float] = {}  # when each stream had its last event
        self._asked_s: float | None = None  # when /health was asked; None = it has answered

    def read(self) -> Gaps:
        """Return what was seen since the last call; a delay counts before it ends, too."""
        seen, self.seen = self.seen, Gaps()
        now_s = time.monotonic()
        seen.stream_s = max([seen.stream_s, *(now_s - one for one in self._last_s.values())])
        if self._asked_s is not None:
            seen.health_s = max(seen.health_s, now_s - self._asked_s)
        return seen

    async def stream(self, number: int) -> None:
        while True:
            try:
                await asyncio.wait_for(self._stream(number), _ANSWER_S)
            except (OSError, EOFError, TimeoutError):
                self.seen.num_failed += 1
                await asyncio.sleep(0.1)

    async def _stream(self, number: int) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        body = json.dumps(
            {
                "prompt": f"{number} planets",
                "max_tokens": 200,
                "ignore_eos": True,
                "stream": True,
                "min_tokens": 200,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            writer.write(head.encode() + body)
            while (line := await reader.readline()) != b"data: [DONE]\n":
                if not line:
                    raise EOFError
                if line.startswith(b"data: "):
                    now_s = time.monotonic()
                    last_s = self._last_s.get(number, now_s)
                    self.seen.stream_s = max(self.seen.stream_s, now_s - last_s)
                    self._last_s[number] = now_s
                    self.seen.num_events += 1
        finally:
            self._last_s.pop(number, None)
            writer.close()

    async def health(self) -> None:
        while True:
            began_s = self._asked_s = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                answer = await asyncio.wait_for(reader.read(), _ANSWER_S)
                writer.close()
                if not answer.startswith(b"HTTP/1.1 200"):
                    self.seen.num_failed += 1
            except (OSError, TimeoutError):
                self.seen.num_failed += 1
            self._asked_s = None
            self.seen.health_s = max(self.seen.health_s, time.monotonic() - began_s)
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def noise(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.01)
            self.seen.noise_s = max(self.seen.noise_s, time.monotonic() - began_s - 0.01)


async def _main(url: str, num_streams: int) -> None:
    probe = _Probe(url)
    loop = asyncio.get_running_loop()
    running = [probe.stream(number) for number in range(num_streams)]
    tasks = [loop.create_task(one) for one in (*running, probe.health(), probe.noise())]
    while await loop.run_in_executor(None, sys.stdin.readline):
        sys.stdout.write(json.dumps(asdict(probe.read())) + "\n")
        sys.stdout.flush()
    for task in tasks:
        task.cancel()


class StreamProbe:
    """The process, from its parent's side."""

    def __init__(self, url: str, num_streams: int) -> None:
        command = [sys.executable, str(Path(__file__)), url, str(num_streams)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self) -> Gaps:
        """Return what was seen since the last call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Gaps(**json.loads(self._process.stdout.readline()))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
