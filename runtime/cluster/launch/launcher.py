"""What starts engines, wherever that is: processes here, or nothing, for URLs that others run."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from ..wire import EngineStatus

STARTING, READY, DRAINING, EXITED = "starting", "ready", "draining", "exited"


class EngineLauncher(Protocol):
    """Starts engines, stops them, and says what becomes of them. On one event loop."""

    async def start(self, engine_id: str) -> None:
        """Begin one, which is listed from then on; again, if it has exited.

        Raises ``CorunError`` if it cannot begin.
        """
        ...

    async def stop(self, engine_id: str, *, drain_timeout_s: float) -> None:
        """Have it take no new requests and end; return when it is not listed any more.

        What still runs after ``drain_timeout_s`` is cut. Of one that is not listed, nothing.
        """
        ...

    def list(self) -> tuple[EngineStatus, ...]:
        """All that were started and not stopped, those included that have exited by themselves."""
        ...

    def watch(self) -> AsyncGenerator[EngineStatus, None]:
        """Yield the status of each now, and from then on each new one; ends with ``close``."""
        ...

    async def close(self) -> None:
        """End what it started, at once, and leave nothing behind. Idempotent."""
        ...


class StatusBoard:
    """The statuses of a launcher's engines, and their watchers."""

    def __init__(self) -> None:
        self._statuses: dict[str, EngineStatus] = {}
        self._watchers: set[asyncio.Queue[EngineStatus | None]] = set()

    def get(self, engine_id: str) -> EngineStatus | None:
        """Of one; None if it is not listed."""
        return self._statuses.get(engine_id)

    def list(self) -> tuple[EngineStatus, ...]:
        """Of all."""
        return tuple(self._statuses.values())

    def set(self, status: EngineStatus) -> None:
        """List it, or list it otherwise, and tell."""
        if self._statuses.get(status.engine_id) != status:
            self._statuses[status.engine_id] = status
            self._publish(status)

    def change(self, engine_id: str, **fields: object) -> None:
        """Change some fields of one that is listed."""
        status = self._statuses.get(engine_id)
        if status is not None:
            self.set(msgspec.structs.replace(status, **fields))

    def remove(self, engine_id: str) -> None:
        """Remove it from the list; watchers are notified that it has exited."""
        status = self._statuses.pop(engine_id, None)
        if status is not None and status.state != EXITED:
            self._publish(msgspec.structs.replace(status, state=EXITED, url=None, pid=0))

    def close(self) -> None:
        """End all watching."""
        for watcher in self._watchers:
            watcher.put_nowait(None)

    async def watch(self) -> AsyncGenerator[EngineStatus, None]:
        """See ``EngineLauncher.watch``."""
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
