"""Adapter operations of ``AsyncEngine``: asked once, however many requests wait for them."""

import asyncio
import itertools

from ..engine.client import EngineClient
from ..engine.messages import AdapterOperation, AddAdapter, OperationDone, PinAdapter, RemoveAdapter
from ..errors import AdapterError, EngineDeadError, rebuild_error
from .inputs import Lora
from .lora_directory import LoraDirectory, adapter_path, check_lora_request
from .outputs import LoRARequest


class LoraClient:
    """Registers, unregisters and looks up adapters through an engine client."""

    def __init__(self, client: EngineClient) -> None:
        self.directory = LoraDirectory()
        self._client = client
        self._operation_ids = itertools.count(1)
        self._operations: dict[int, asyncio.Future[None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}  # by adapter name

    async def resolve(self, lora: Lora) -> None:
        """Raise unless requests can name ``lora``; registers what is new."""
        if isinstance(lora, str):
            self.directory.check_usable(lora)
        elif lora is not None:
            await self.add(lora, reload=False)

    async def add(self, lora: LoRARequest, *, reload: bool, pinned: bool | None = None) -> None:
        check_lora_request(lora)
        if not reload and self.directory.has(lora):
            if pinned is not None:
                await self.pin(lora.lora_name, pinned=pinned)
            return
        lock = self._locks.setdefault(lora.lora_name, asyncio.Lock())
        async with lock:
            if reload or not self.directory.has(lora):
                path = adapter_path(lora)
                number = next(self._operation_ids)
                await self._run(AddAdapter(number, lora.lora_name, path, pinned))

    async def pin(self, name: str, *, pinned: bool) -> None:
        self.directory.check_known(name, param="lora_name")
        await self._run(PinAdapter(next(self._operation_ids), name, pinned))

    async def remove(self, name: str) -> None:
        self.directory.check_known(name)
        await self._run(RemoveAdapter(next(self._operation_ids), name))

    def operation_done(self, message: OperationDone) -> None:
        """Take the end of an operation."""
        future = self._operations.pop(message.operation_id, None)
        if future is None or future.done():
            return
        if message.error is None:
            future.set_result(None)
        else:
            future.set_exception(
                rebuild_error(message.error_kind, message.error, default=AdapterError)
            )

    def fail_all(self, error: EngineDeadError) -> None:
        """End every operation with ``error``."""
        for future in self._operations.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
        self._operations.clear()

    async def _run(self, message: AdapterOperation) -> None:
        future = asyncio.get_running_loop().create_future()
        self._operations[message.operation_id] = future
        try:
            self._client.send(message)
            await future
        finally:
            self._operations.pop(message.operation_id, None)
