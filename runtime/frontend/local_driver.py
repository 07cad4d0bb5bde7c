"""Drives an engine in the current thread: submit, then turn until what is wanted has come.

Owns the way of updates to their generations; knows nothing of prompts or text.
"""

import contextlib
import selectors
import socket
from collections.abc import Iterable, Sequence

from ..engine.loop import EngineAssembly, EngineHost
from ..engine.messages import (
    AbortRequests,
    AdaptersChanged,
    AddAdapter,
    AddRequest,
    EngineStats,
    FromEngine,
    OperationDone,
    RemoveAdapter,
    RequestUpdate,
    StepOutputs,
)
from .generation import Generation
from .lora_directory import LoraDirectory


class LocalDriver:
    """One assembled engine, in one thread. ``close`` leaves the assembly alone.

    ``directory`` and ``stats`` may be read from other threads.
    """

    def __init__(self, assembly: EngineAssembly, wake: socket.socket) -> None:
        """``wake``: non-blocking; what arrives on it ends a wait."""
        self._core = assembly.core
        self._host = EngineHost(assembly)
        self._selector = selectors.DefaultSelector()
        self._wake = wake
        for fileno in {wake.fileno(), *self._host.filenos()}:
            self._selector.register(fileno, selectors.EVENT_READ)
        self._is_closed = False
        self._generations: dict[int, Generation] = {}  # by engine request
        self._ended_operations: dict[int, OperationDone] = {}
        self.directory = LoraDirectory(assembly.adapters.infos())
        self.stats = EngineStats()

    def close(self) -> None:
        """Forget everything, the engine too. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._generations.clear()
        self._selector.close()
        del self._core, self._host  # who keeps a closed front end does not keep the model

    def has_room(self, num_requests: int, max_num_waiting: int) -> bool:
        """Whether so many more can wait; an engine with nothing to do is always asked."""
        if not self._generations:
            return True
        return self._core.stats().num_waiting + num_requests <= max_num_waiting

    def submit(self, generation: Generation, requests: Sequence[AddRequest]) -> None:
        """Hand over a generation's requests."""
        for request in requests:
            self._generations[request.request_id] = generation
            self._host.handle(request)

    def abort(self, generations: Iterable[Generation]) -> None:
        """End what is still open of these; nothing more of them is looked at."""
        open_ids: list[int] = []
        for generation in generations:
            open_ids += generation.open_engine_ids
            for engine_id in generation.engine_ids:
                self._generations.pop(engine_id, None)
        if open_ids:
            self._host.handle(AbortRequests(tuple(open_ids)))

    def begin_operation(self, message: AddAdapter | RemoveAdapter) -> None:
        """Begin an adapter operation."""
        self._host.handle(message)

    def take_operation(self, operation_id: int) -> OperationDone | None:
        """Return how an operation ended, once."""
        return self._ended_operations.pop(operation_id, None)

    def turn(self) -> None:
        """Let the engine take one step, as soon as it can, and deliver what it says."""
        if not self._host.can_turn:
            self._selector.select()
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
        for message in self._host.turn():
            self._take(message)

    def _take(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(updates, stats):
                self.stats = stats
                for update in updates:
                    self._take_update(update)
            case AdaptersChanged(adapters):
                self.directory.replace(adapters)
            case OperationDone():
                self._ended_operations[message.operation_id] = message

    def _take_update(self, update: RequestUpdate) -> None:
        generation = self._generations.get(update.request_id)
        if generation is None:
            return
        if generation.update(update):
            self._host.handle(AbortRequests((update.request_id,)))
        if update.finish_reason is not None:
            self._generations.pop(update.request_id, None)
