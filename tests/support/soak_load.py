"""Clients that come and leave beside changes of adapters, on one server, for hours.

What is sent follows from the seed alone. The adapters are variants of the demo's, with ranks from 4
to 24, and an answer shows the weights that made it.
"""

import asyncio
import contextlib
import itertools
import json
import random
import shutil
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from corun.runtime.demo import chat_prompt, demo_adapters_path
from safetensors.torch import load_file, save_file

from .adapter_files import WEIGHTS

# The answer of each of these demo tasks to the word; no answer is a prefix of another.
WORD = "planet"
ANSWERS = {"upper": "PLANET", "vowels": "pl*n*t", "reverse": "tenalp"}
_UNLOADED = (404, 503)  # 503 while earlier requests for it run
_ANSWER_TIMEOUT_S = 60.0
_MAX_ERROR_CHARS = 400
_KEPT_S = 60.0  # files of old versions: running requests may still read them


@dataclass(frozen=True)
class Load:
    """What runs beside each other."""

    num_adapters: int = 300
    requests_per_s: float = 6.0
    leaving_share: float = 0.3
    skew: float = 1.0  # the n-th adapter is asked for in proportion to n ** -skew
    seed: int = 0


@dataclass(frozen=True)
class Visit:
    """One request: after which time, of which adapter, and how its client leaves."""

    gap_s: float
    place: int
    prompt: str
    num_tokens: int
    leaves_after: int | None  # events of the stream; None = it reads all
    aborts: bool  # its connection is reset


@dataclass
class Adapter:
    """A name, and the tasks of its versions."""

    name: str
    path: Path  # of the newest version
    tasks: list[str]
    first: int = 0  # the oldest version that a new request may get
    is_served: bool = True


@dataclass
class Tally:
    """What has happened."""

    first_tokens: list[tuple[float, float]] = field(default_factory=list)  # when, seconds
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


class WrongAnswerError(Exception):
    """An answer that the server should not have given."""


def write_adapter(directory: Path, task: str, rng: random.Random) -> None:
    """Write the demo's adapter of ``task`` with contents of its own.

    Some of its ranks change their signs in both matrices, which changes no product.
    """
    shutil.copytree(demo_adapters_path() / task, directory)
    tensors = load_file(directory / WEIGHTS)
    for name in [name for name in tensors if "lora_A" in name]:
        num_ranks = len(tensors[name])
        signs = torch.tensor(rng.choices((1, -1), k=num_ranks), dtype=tensors[name].dtype)
        tensors[name] *= signs[:, None]
        tensors[name.replace("lora_A", "lora_B")] *= signs
    save_file(tensors, directory / WEIGHTS)


def visits(load: Load) -> Iterator[Visit]:
    """The requests, without an end."""
    weights = [(place + 1) ** -load.skew for place in range(load.num_adapters)]
    summed = list(itertools.accumulate(weights))
    for number in itertools.count():
        rng = random.Random(f"{load.seed} visit {number}")
        num_tokens = rng.randint(8, 48)
        is_left = rng.random() < load.leaving_share
        yield Visit(
            gap_s=rng.expovariate(load.requests_per_s),
            place=rng.choices(range(load.num_adapters), cum_weights=summed)[0],
            prompt=WORD if rng.random() < 0.75 else WORD + rng.randint(9, 60) * " again",
            num_tokens=num_tokens,
            leaves_after=rng.randrange(num_tokens) if is_left else None,
            aborts=rng.random() < 0.5,
        )


class SoakLoad:
    """The clients and the changes; ``tally`` is what they have seen so far."""

    def __init__(self, load: Load, directory: Path) -> None:
        """Write the first adapters into ``lora_dir``; later ones are in ``loaded_dir``."""
        self.tally = Tally()
        self.lora_dir, self.loaded_dir = directory / "first", directory / "loaded"
        self.loaded_dir.mkdir(parents=True)
        self._load = load
        self._served: list[Adapter] = []
        self._unloaded: list[str] = []
        self._old: list[tuple[float, Path]] = []  # since when files are not needed
        self._address = ("", 0)
        self._visits = visits(load)
        self._changes = enumerate(itertools.cycle(("unload", "load", "reload")))
        self._place = 0  # of the last change
        rng = random.Random(f"{load.seed} first")
        for number in range(load.num_adapters):
            name = f"first-{number}"
            self._served.append(Adapter(name, *self._write(self.lora_dir / name, rng)))

    def _write(self, path: Path, rng: random.Random) -> tuple[Path, list[str]]:
        task = rng.choice(list(ANSWERS))
        write_adapter(path, task, rng)
        return path, [task]

    async def run(self, url: str, end_s: float) -> None:
        """Send and change until ``end_s`` of the monotonic clock; another call goes on."""
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._change_until(end_s))
            for visit in self._visits:
                await asyncio.sleep(visit.gap_s)
                if time.monotonic() >= end_s:
                    break
                group.create_task(self._guard("request", self._visit(visit)))

    async def check_served(self) -> None:
        """Ask each adapter for its answer, and each that was unloaded for none."""
        for adapter in self._served:
            if adapter.is_served:
                await self._guard("served", self._check_answer(adapter))
        for name in self._unloaded:
            await self._guard("unloaded", self._check_gone(name, (404,)))

    async def _guard(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Count what was done, and keep how it failed."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await work
            self.tally.counts[what] += 1
        except (OSError, EOFError, TimeoutError, ValueError, WrongAnswerError) as error:
            self.tally.errors.append(f"{what}: {error!r}"[:_MAX_ERROR_CHARS])

    @contextlib.asynccontextmanager
    async def _post(
        self, path: str, body: dict[str, Any], *, aborts: bool = False
    ) -> AsyncIterator[asyncio.StreamReader]:
        """Send a request on a connection of its own, and yield the answer to be read."""
        reader, writer = await asyncio.open_connection(*self._address)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        try:
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
            yield reader
        finally:
            if aborts:  # with SO_LINGER of 0, closing resets the connection
                linger = struct.pack("ii", 1, 0)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()

    async def _call(self, path: str, **body: Any) -> tuple[int, str]:
        async with self._post(path, body) as reader:
            status = await _status(reader)
            return status, (await reader.read()).partition(b"\r\n\r\n")[2].decode()

    async def _visit(self, visit: Visit) -> None:
        place = visit.place
        while not self._served[place].is_served:
            place = (place + 1) % len(self._served)
        adapter = self._served[place]
        first, began_s = adapter.first, time.monotonic()
        body = {
            "model": adapter.name,
            "prompt": chat_prompt(visit.prompt),
            "stream": True,
            "temperature": 0,
            "max_tokens": visit.num_tokens,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that each token is an event
        }
        aborts = visit.leaves_after is not None and visit.aborts
        async with self._post("/v1/completions", body, aborts=aborts) as reader:
            if visit.leaves_after == 0:
                self.tally.counts["left"] += 1
                return
            status = await _status(reader)
            if status in _UNLOADED and not adapter.is_served:
                self.tally.counts["unloaded meanwhile"] += 1
                return
            if status != 200:
                raise WrongAnswerError(f"{adapter.name}: {status} {await reader.read()!r}")
            texts: list[str] = []
            async for text in _events(reader):
                if not texts:
                    now_s = time.monotonic()
                    self.tally.first_tokens.append((now_s, now_s - began_s))
                texts.append(text)
                if len(texts) == visit.leaves_after:
                    self.tally.counts["left"] += 1
                    break
        if visit.prompt == WORD:
            _check_text("".join(texts), adapter.name, adapter.tasks[first:])

    async def _check_answer(self, adapter: Adapter) -> None:
        status, text = await self._call(
            "/v1/completions", model=adapter.name, prompt=chat_prompt(WORD), temperature=0
        )
        _check(status == 200, f"{adapter.name}: {status} {text}")
        answer = json.loads(text)["choices"][0]["text"]
        _check_text(answer, adapter.name, adapter.tasks[-1:])

    async def _check_gone(self, name: str, statuses: tuple[int, ...]) -> None:
        status, text = await self._call("/v1/completions", model=name, prompt="a", max_tokens=1)
        _check(status in statuses, f"{name} is unloaded: {status} {text}")

    async def _change_until(self, end_s: float) -> None:
        """One unload, one load and one reload a second."""
        calls = {"unload": self._unload, "load": self._load_new, "reload": self._reload}
        began_s = time.monotonic()
        for done, (number, what) in enumerate(self._changes):
            await asyncio.sleep(began_s + done / len(calls) - time.monotonic())
            rng = random.Random(f"{self._load.seed} change {number}")
            if what != "load":  # which takes the place of the one before
                self._place = rng.randrange(len(self._served))
            await self._guard(what, calls[what](self._place, rng))
            while self._old and self._old[0][0] < time.monotonic() - _KEPT_S:
                await asyncio.to_thread(shutil.rmtree, self._old.pop(0)[1])
            if time.monotonic() >= end_s:
                return

    async def _unload(self, place: int, _: random.Random) -> None:
        adapter = self._served[place]
        adapter.is_served = False
        await self._change("unload", lora_name=adapter.name)
        self._unloaded.append(adapter.name)
        self._old.append((time.monotonic(), adapter.path))
        await self._check_gone(adapter.name, _UNLOADED)

    async def _load_new(self, place: int, rng: random.Random) -> None:
        name = f"loaded-{rng.getrandbits(64):016x}"
        adapter = Adapter(name, *await asyncio.to_thread(self._write, self.loaded_dir / name, rng))
        await self._change("load", lora_name=name, lora_path=str(adapter.path))
        self._served[place] = adapter

    async def _reload(self, place: int, rng: random.Random) -> None:
        adapter = self._served[place]
        self._old.append((time.monotonic(), adapter.path))
        # Beside the old files, which may not have been read yet.
        path = self.loaded_dir / f"{adapter.name}.{len(adapter.tasks)}"
        adapter.path, tasks = await asyncio.to_thread(self._write, path, rng)
        adapter.tasks += tasks
        await self._change("load", lora_name=adapter.name, lora_path=str(adapter.path), load_inplace=True)
        adapter.first = len(adapter.tasks) - 1

    async def _change(self, verb: str, **body: Any) -> None:
        status, text = await self._call(f"/v1/{verb}_lora_adapter", **body)
        _check(status == 200, f"{body}: {status} {text}")


async def _status(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line:
        raise EOFError("the connection was closed without an answer")
    return int(line.split()[1])


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """The texts of a stream's events; raises for an error, and for a stream without its end."""
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if not line:
            raise EOFError("the stream was cut")
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            _check("error" not in event, line.decode())
            yield event["choices"][0]["text"]


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise WrongAnswerError(what)


def _check_text(text: str, name: str, tasks: list[str]) -> None:
    """Whether a whole or cut answer is that of one of the versions."""
    expected = [ANSWERS[task] for task in tasks]
    is_right = any(text.startswith(one) or one.startswith(text) for one in expected)
    _check(is_right, f"{name}: {text!r}, expected {expected}")
