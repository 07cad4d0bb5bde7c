"""The requests that are being answered, and the reasons to end one early."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive

from .errors import ClientGoneError


class OpenRequest:
    """One request that is being answered, by the task that made this object.

    It ends early because its client leaves, because the engine dies or because the server stops.
    In each case its task is cancelled with a cause; closing its generators aborts it in the engine.
    """

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self.cause: Exception | None = None
        self._task = task

    def end(self, cause: Exception) -> None:
        """Cancel the request; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            self._task.cancel()


class OpenRequests:
    """All requests that are being answered."""

    def __init__(self) -> None:
        self._requests: set[OpenRequest] = set()

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def track(self) -> Iterator[OpenRequest]:
        """Count the current task as open; raise the cause if ``end`` cancels it."""
        task = asyncio.current_task()
        assert task is not None
        request = OpenRequest(task)
        self._requests.add(request)
        try:
            yield request
        except asyncio.CancelledError:
            if request.cause is None:
                raise
            task.uncancel()
            raise request.cause from None
        finally:
            self._requests.discard(request)

    def end_all(self, cause: Exception) -> None:
        """End every open request with ``cause``."""
        for request in tuple(self._requests):
            request.end(cause)

    async def wait_none(self, timeout_s: float, *, poll_interval_s: float = 0.02) -> bool:
        """Return True once no request is open, or False after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self._requests:
            if loop.time() >= deadline_s:
                return False
            await asyncio.sleep(poll_interval_s)
        return True


@contextmanager
def ended_by_disconnect(receive: Receive, request: OpenRequest) -> Iterator[None]:
    """End ``request`` when its client closes the connection. The body must have been read."""
    watcher = asyncio.ensure_future(_wait_disconnect(receive, request))
    try:
        yield
    finally:
        watcher.cancel()


async def _wait_disconnect(receive: Receive, request: OpenRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.end(ClientGoneError())
