"""What all endpoints of one server share: the engine behind it, and the requests that are open."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Receive

from ..errors import EngineDeadError
from .engine_port import EnginePort, RendererPort
from .errors import SHUTTING_DOWN, ClientGoneError, HttpError
from .fields import UnknownFields
from .metrics import ServerMetrics
from .model_names import ModelNames, ResolvedModel
from .settings import AppSettings


class OpenRequest:
    """One request that is being answered, by the task that made this object.

    It ends early because its client leaves, because the engine dies or because the server stops.
    In each case its task is cancelled with a cause; closing its generators aborts it in the engine.
    """

    def __init__(self, task: "asyncio.Task[object]") -> None:
        self.cause: Exception | None = None
        self._task = task

    def end(self, cause: Exception) -> None:
        """Interrupt the request; the first cause counts."""
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
        """Count the current task as open; raise the cause if the request is ended from outside."""
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
        """Return True once no request is open, False when ``timeout_s`` has passed before."""
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


@dataclass(slots=True)
class ServerState:
    """One engine behind one application."""

    engine: EnginePort
    settings: AppSettings
    names: ModelNames
    metrics: ServerMetrics
    unknown_fields: UnknownFields
    created_s: int  # Unix time, for /v1/models
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    draining: bool = False  # no new requests; those that run may finish

    async def resolve(self, model: str | None) -> ResolvedModel:
        """Return what ``model`` stands for; names that are not known are looked for."""
        meant = self.names.adapter_meant(model, self.engine.loras)
        if meant is not None:
            await self.engine.find_lora(meant)
        return self.names.resolve(model, self.engine.loras)

    async def renderer_of(self, adapter_name: str | None) -> RendererPort:
        """Return the chat template for an adapter's conversations; None = the base model."""
        conventions = await self.engine.conventions_of(adapter_name)
        return self.engine.tokenizer if conventions.template is None else conventions

    def check_accepting(self) -> None:
        """Raise unless new requests are served."""
        error = self.engine.error
        if error is not None:
            raise EngineDeadError(f"the engine is dead: {error}")
        if self.draining:
            raise HttpError(503, "the server is shutting down", code=SHUTTING_DOWN)


def make_state(engine: EnginePort, settings: AppSettings, *, now_s: int) -> ServerState:
    """Build the state for an engine that is ready."""
    names = ModelNames(tuple(settings.served_names) or (engine.get_model_info().name,))
    unknown_fields = UnknownFields(settings.unknown_fields, settings.limits)
    metrics = ServerMetrics(engine, settings, names.base, unknown_fields)
    return ServerState(engine, settings, names, metrics, unknown_fields, now_s)
