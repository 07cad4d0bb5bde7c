"""Launchers start engines: as local processes, or not at all for running ones (URLs)."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from ..wire import EngineStatus

STARTING, READY, DRAINING, EXITED = "starting", "ready", "draining", "exited"


class EngineLauncher(Protocol):
    """Starts and stops engines, and reports their status. On one event loop."""

    async def start(self, engine_id: str) -> None:
        """Start an engine, also one that has exited; it is listed from then on.

        Raises ``CorunError`` if it cannot be started.
        """

    async def stop(self, engine_id: str, *, drain_timeout_s: float) -> None:
        """Stop an engine after its requests, and remove it from the list.

        Requests that run after ``drain_timeout_s`` are cut. An unlisted engine is ignored.
        """

    def list(self) -> tuple[EngineStatus, ...]:
        """Return all engines that were started and not stopped, also those that have exited."""

    def watch(self) -> AsyncGenerator[EngineStatus, None]:
        """Yield the current status of each engine, then each change, until ``close``."""

    async def close(self) -> None:
        """Kill all engines that it started. Idempotent."""


class StatusBoard:
    """The statuses of a launcher's engines, and their watchers."""

    def __init__(self) -> None:
        self._statuses: dict[str, EngineStatus] = {}
        self._watchers: set[asyncio.Queue[EngineStatus | None]] = set()

    def get(self, engine_id: str) -> EngineStatus | None:
        """Return an engine's status; None if it is not listed."""
        return self._statuses.get(engine_id)

    def list(self) -> tuple[EngineStatus, ...]:
        return tuple(self._statuses.values())

    def set(self, status: EngineStatus) -> None:
        """Set an engine's status, and notify watchers of a change."""
        if self._statuses.get(status.engine_id) != status:
            self._statuses[status.engine_id] = status
            self._publish(status)

    def change(self, engine_id: str, **fields: object) -> None:
        status = self._statuses.get(engine_id)
        if status is not None:
            self.set(msgspec.structs.replace(status, **fields))

    def remove(self, engine_id: str) -> None:
        """Remove an engine from the list, and notify watchers that it has exited."""
        status = self._statuses.pop(engine_id, None)
        if status is not None and status.state != EXITED:
            self._publish(msgspec.structs.replace(status, state=EXITED, url=None, pid=0))

    def close(self) -> None:
        """End all ``watch`` iterations."""
        for watcher in self._watchers:
            watcher.put_nowait(None)

    async def watch(self) -> AsyncGenerator[EngineStatus, None]:
        watcher: asyncio.Queue[EngineStatus | None] = asyncio.Queue()
        for status in self._statuses.values():
            watcher.put_nowait(status)
        self._watchers.add(watcher)
        try:
            while (status_or_end := await watcher.get()) is not None:
                yield status_or_end
        finally:
            self._watchers.discard(watcher)

    def _publish(self, status: EngineStatus) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(status)
