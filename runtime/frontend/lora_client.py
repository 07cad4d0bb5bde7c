"""Adapter operations of ``AsyncEngine``: each is sent once for any number of waiting requests."""

import asyncio
import copy
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable

from ..adapters.conventions import NO_CONVENTIONS, AdapterConventions
from ..adapters.info import AdapterInfo
from ..adapters.mix import LoRAMix
from ..adapters.names import FAILED, READY, check_adapter_name
from ..engine.client import EngineClient
from ..engine.messages import (
    AdapterOperation,
    AddAdapter,
    OperationDone,
    PinAdapter,
    ReadAdapter,
    RemoveAdapter,
)
from ..errors import (
    AdapterError,
    AdapterUnavailableError,
    AdminKeyNeededError,
    CorunError,
    EngineDeadError,
    UnknownModelError,
    rebuild_error,
)
from ..file_calls import FILES, Place
from ..limits import HubLimits, overdue_error
from .hub_budget import HubBudget
from .inputs import Lora, LoraDirectory, adapter_path, check_lora_request
from .lora_resolvers import HubResolver, LoraResolver, make_resolver
from .outputs import LoRARequest
from .requester import IS_ADMIN

_UNKNOWN_S = 10.0  # during which resolvers are not asked again
_MAX_UNKNOWN = 4096  # names; for older ones resolvers are asked again
_RESOLVE_TIMEOUT_S = 120.0  # a download continues and is found at the next request

_Sought = tuple[str, bool]  # a name, and whether an administrator asks for it


class LoraClient:
    """Registers, unregisters and looks up adapters through an engine client."""

    def __init__(
        self,
        client: EngineClient,
        clock: Callable[[], float] = time.monotonic,
        *,
        hub_limits: HubLimits | None = None,
    ) -> None:
        """``hub_limits``: of adapters that are fetched from the hub; None = the default ones."""
        self._clock = clock
        self.directory = LoraDirectory()
        self._base_name = ""
        budget = HubBudget(hub_limits or HubLimits(), self.directory.__contains__)
        self._resolvers = [make_resolver(text, budget) for text in client.config.lora_resolver]
        # Until when resolvers are not asked, and the error that is raised instead.
        self._unknown: dict[_Sought, tuple[float, CorunError | None]] = {}
        self._finding: dict[_Sought, asyncio.Task[None]] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._client = client
        self._operation_ids = itertools.count(1)
        self._operations: dict[int, asyncio.Future[None]] = {}
        # By adapter name, as long as one waits for it or holds it.
        self._locks = weakref.WeakValueDictionary[str, asyncio.Lock]()

    def begin(self, base_name: str, adapters: Iterable[AdapterInfo]) -> None:
        """The engine is ready."""
        self._base_name = base_name
        self.directory.update(adapters)

    def add_resolver(self, resolver: LoraResolver) -> None:
        self._resolvers.append(resolver)

    async def resolve(self, lora: Lora) -> None:
        """Raise unless requests can use ``lora``; registers it if it is new."""
        if isinstance(lora, str):
            await self.find(lora)
            self.directory.check_usable(lora)
        elif isinstance(lora, LoRAMix):
            for name, _ in lora.parts:
                await self.find(name)
                self.directory.check_usable(name, param="lora")
        elif lora is not None:
            await self.add(lora, reload=False)

    def conventions_of(self, name: str) -> AdapterConventions | None:
        """Return those of the version in service; None if its files have not been read.

        An adapter that cannot be used has none of its own; the engine reports the error.
        """
        info = self.directory.get(name)
        return NO_CONVENTIONS if info is None or info.state != READY else info.conventions

    async def read_conventions_of(self, name: str, timeout_s: float | None) -> AdapterConventions | None:
        """Let the engine read an adapter's files; return its conventions. Calls share one read.

        Raises ``AdapterFailedError`` if that fails, ``UnknownModelError`` if the adapter was
        removed meanwhile, ``OverloadedError`` if it takes too long.
        """
        task = self._reading.get(name)
        if task is None:
            message = ReadAdapter(next(self._operation_ids), name)
            task = asyncio.get_running_loop().create_task(self._run(message))
            self._reading[name] = task
            task.add_done_callback(lambda _: self._reading.pop(name, None))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(task)
        except TimeoutError:
            assert timeout_s is not None
            raise overdue_error(timeout_s) from None
        except AdapterError:
            self.directory.check_usable(name)  # raises the error that later requests get
            raise
        return self.conventions_of(name)

    async def find(self, name: str) -> None:
        """Register the adapter that a resolver finds for an unknown name; else do nothing.

        Raises ``AdapterError`` if it cannot be served, ``UnknownModelError`` with the reason if a
        resolver failed, ``AdapterUnavailableError`` if that takes too long, and
        ``AdminKeyNeededError`` if only an administrator may have it fetched.
        """
        sought = name, IS_ADMIN.get()
        task = self._finding.get(sought)  # which runs until the adapter can be used
        if task is None:
            if not self._resolvers or not self._is_sought(sought):
                return
            until_s, error = self._unknown.get(sought, (0.0, None))
            if self._clock() < until_s:
                if error is not None:
                    raise copy.copy(error)  # each caller gets a traceback of its own
                return
            task = asyncio.get_running_loop().create_task(self._find(sought))
            self._finding[sought] = task
            task.add_done_callback(lambda _: self._finding.pop(sought, None))
        await asyncio.shield(task)  # other requests may wait for it too

    def _is_sought(self, sought: _Sought) -> bool:
        """Whether resolvers may be asked. They make paths of names, so the name must be valid."""
        name, _ = sought
        info = self.directory.get(name)
        if info is not None:  # its files may have been corrected since it was refused
            return info.state == FAILED and sought in self._unknown
        try:
            check_adapter_name(name)
        except AdapterError:
            return False
        return True

    async def _find(self, sought: _Sought) -> None:
        name, _ = sought
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                found = await self._ask_resolvers(sought)
            if found is not None:
                await self.add(found, reload=False)
                self._unknown.pop(sought, None)
                return
        except TimeoutError as error:
            raise AdapterUnavailableError(
                f"adapter {name!r} was not found within {_RESOLVE_TIMEOUT_S:g} s"
            ) from error
        except (AdapterError, UnknownModelError, AdminKeyNeededError) as error:
            self._remember_unknown(sought, error)
            raise
        self._remember_unknown(sought, None)

    async def _ask_resolvers(self, sought: _Sought) -> LoRARequest | None:
        """Return the first adapter that a resolver finds.

        Raises ``AdminKeyNeededError`` or ``UnknownModelError`` if a resolver may not look or failed
        and no other one finds it.
        """
        name, is_admin = sought
        failure: AdminKeyNeededError | UnknownModelError | None = None
        for resolver in self._resolvers:
            if isinstance(resolver, HubResolver) and not is_admin and resolver.needs_admin(name):
                failure = failure or _admin_needed(name)
                continue
            try:
                found = await resolver.resolve_lora(self._base_name, name)
            except UnknownModelError as error:
                failure = error
            else:
                if found is not None:
                    return found
        if failure is not None:
            raise failure
        return None

    def _remember_unknown(self, sought: _Sought, error: CorunError | None) -> None:
        while len(self._unknown) >= _MAX_UNKNOWN:
            del self._unknown[next(iter(self._unknown))]
        self._unknown[sought] = self._clock() + _UNKNOWN_S, copy.copy(error)

    async def add(
        self, lora: LoRARequest, *, reload: bool, pinned: bool | None = None, replace: bool = True
    ) -> None:
        check_lora_request(lora)
        if not reload and await self._has(lora):
            if pinned is not None:
                await self.pin(lora.lora_name, pinned=pinned)
            return
        lock = self._locks.setdefault(lora.lora_name, asyncio.Lock())
        async with lock:
            if reload or not await self._has(lora):
                path = adapter_path(lora)
                number = next(self._operation_ids)
                await self._run(AddAdapter(number, lora.lora_name, path, pinned, replace))

    async def _has(self, lora: LoRARequest) -> bool:
        """Whether this very adapter (name and path) is registered and ready."""
        path, known = adapter_path(lora), self.directory.ready_path(lora.lora_name)
        if known is None or known == path:
            return known is not None

        def is_same(_: Place) -> bool:
            return os.path.realpath(known) == os.path.realpath(path)

        try:
            return await FILES.answer(is_same, path)
        except OSError as error:
            raise AdapterUnavailableError(
                f"adapter {lora.lora_name!r}: {path} cannot be read: {error.strerror}"
            ) from error

    async def pin(self, name: str, *, pinned: bool) -> None:
        self.directory.check_known(name, param="lora_name")
        await self._run(PinAdapter(next(self._operation_ids), name, pinned))

    async def remove(self, name: str) -> None:
        self.directory.check_known(name)
        await self._run(RemoveAdapter(next(self._operation_ids), name))

    def operation_done(self, message: OperationDone) -> None:
        future = self._operations.pop(message.operation_id, None)
        if future is None or future.done():
            return
        if message.error is None:
            future.set_result(None)
        else:
            future.set_exception(rebuild_error(message.error_kind, message.error, default=AdapterError))

    def fail_all(self, error: EngineDeadError) -> None:
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


def _admin_needed(name: str) -> AdminKeyNeededError:
    return AdminKeyNeededError(
        f"adapter {name!r} is not registered, and is fetched from the hub only for a request with "
        "an administrator's key (--lora-resolver hub, --admin-key)",
        param="lora_request",
    )
