"""The interface of engine types to gateways and the controller: one stateless object per type.

An engine of corun reports its profile and state itself. For vLLM the state is derived from metrics
and from the requests that were sent to it, and costs from its answers.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from ...server.answers import ModelCard
from ..wire import AdapterEntry, EngineCard, EngineProfile, EngineState


@dataclass(slots=True)
class SentRecord:
    """What one gateway or controller has sent to an engine's process."""

    gateway_id: str
    entries: Callable[[], Mapping[str, AdapterEntry]]  # current adapters by name
    last_number: int = 0  # of the requests sent so far
    used: dict[str, None] = field(default_factory=dict)  # adapters, in the order of their last use

    def use(self, name: str) -> None:
        self.used.pop(name, None)
        self.used[name] = None

    def clear(self) -> None:
        """Reset after a restart of the engine."""
        self.last_number = 0
        self.used.clear()


class Translation(Protocol):
    """Translates one request for an engine, and its answer for the client."""

    def body(self, body: bytes) -> bytes:
        """Return the request's body for the engine."""

    def events(self, data: bytes) -> bytes:
        """Return complete events of the engine's stream for the client."""

    def answer(self, status: int, body: bytes) -> bytes:
        """Return the body of an answer, not of a stream, for the client."""


class AdapterApi(Protocol):
    """One engine's routes for adapters. Raises ``HttpError`` with its message if it refuses."""

    async def incarnation(self) -> str:
        """Return the id of the engine's process, as in its states."""

    async def load(self, entry: AdapterEntry, path: str) -> str | None:
        """Load a directory under a name, and replace its former content.

        Returns its name in requests to the engine; None = ``entry.name``.
        """

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Pin or unpin a served name on the device; only if the type has ``can_pin``."""

    async def unload(self, name: str) -> None:
        """Unload a name; its running requests go on."""


class EngineType(Protocol):
    """An engine type. Every call has a deadline and raises ``HttpError``."""

    can_pin: bool  # whether it can pin adapters
    can_mix: bool  # whether a request can have several adapters
    ready_path: str  # answers 200 while the engine accepts requests

    async def profile(self, session: aiohttp.ClientSession, card: EngineCard) -> EngineProfile: ...

    async def base_cards(self, session: aiohttp.ClientSession, card: EngineCard) -> tuple[ModelCard, ...]:
        """Return the base model's names."""

    def states(
        self, session: aiohttp.ClientSession, card: EngineCard, sent: SentRecord
    ) -> AsyncGenerator[EngineState, None]:
        """Yield its states, the first one complete; only an error ends the iteration."""

    def adapters(self, session: aiohttp.ClientSession, url: str) -> AdapterApi:
        """Return its routes for adapters."""

    def translation(self, model: str | None, asked: str | None) -> Translation:
        """Return a request's translation; ``model``: at the engine; ``asked``: by the client."""
