"""What a kind of engine is to gateways and controller: one object of each kind, without state.

Of an engine that tells itself what it is and does (``corun``) all is as it says it; of one that
does not (``vllm``) it is made of its profile, of what it shows, and of what was sent to it.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from ...server.answers import ModelCard
from ..wire import AdapterEntry, EngineCard, EngineProfile, EngineState


@dataclass(slots=True)
class SentRecord:
    """What one side knows by itself of an engine's process: what it has sent there."""

    gateway_id: str
    entries: Callable[[], Mapping[str, AdapterEntry]]  # what names stand for now
    last_number: int = 0  # of the requests sent there
    used: dict[str, None] = field(default_factory=dict)  # adapters, the one used last comes last

    def use(self, name: str) -> None:
        """An adapter is loaded there, or a request for it goes there."""
        self.used.pop(name, None)
        self.used[name] = None

    def clear(self) -> None:
        """It is another process."""
        self.last_number = 0
        self.used.clear()


class Translation(Protocol):
    """How one request is put to an engine, and its answer to the client."""

    def body(self, body: bytes) -> bytes:
        """The request's body for the engine."""
        ...

    def events(self, data: bytes) -> bytes:
        """Whole events of its stream for the client."""
        ...

    def answer(self, status: int, body: bytes) -> bytes:
        """The body of an answer that is no stream for the client."""
        ...


class AdapterApi(Protocol):
    """One engine's routes for adapters. Raises ``HttpError`` with its own words if it refuses."""

    async def incarnation(self) -> str:
        """What names this process of the engine, as its states do."""
        ...

    async def load(self, entry: AdapterEntry, path: str) -> str | None:
        """Serve a directory under a name, and replace what the name was before.

        Returns what requests call it there; None = by its name.
        """
        ...

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Keep a name that it serves on the device, or no longer; only if the kind can."""
        ...

    async def unload(self, name: str) -> None:
        """Have it take no new requests for a name; those it has go on."""
        ...


class EngineType(Protocol):
    """Engines of one kind; every call has a deadline and raises ``HttpError``."""

    can_pin: bool  # adapters
    ready_path: str  # answers 200 while new requests are taken

    async def profile(self, session: aiohttp.ClientSession, card: EngineCard) -> EngineProfile:
        """What the engine is, which is asked whether it still is what was measured."""
        ...

    async def base_cards(
        self, session: aiohttp.ClientSession, card: EngineCard
    ) -> tuple[ModelCard, ...]:
        """The base model's names."""
        ...

    def states(
        self, session: aiohttp.ClientSession, card: EngineCard, sent: SentRecord
    ) -> AsyncGenerator[EngineState, None]:
        """Yield its states, the first one whole; only an error ends them."""
        ...

    def adapters(self, session: aiohttp.ClientSession, url: str) -> AdapterApi:
        """Its routes for adapters."""
        ...

    def translation(self, model: str | None, asked: str | None) -> Translation:
        """Of a request for what the engine calls ``model``, and the client ``asked`` for."""
        ...
