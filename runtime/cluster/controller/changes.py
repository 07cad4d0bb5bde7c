"""Loading, replacing, unloading and pinning adapters, for the whole cluster. One event loop.

Changes of a name run one after the other. Each step is in the registry before the next begins, so
a controller that restarts after a crash knows the unfinished change. It undoes the change, to which
no client has had an answer.
"""

import asyncio
import logging

import msgspec

from ...adapters.names import FAILED, LOADING, READY, check_adapter_name, taken_name, unknown_name
from ...errors import AdapterError, CorunError, RequestError
from ...server.errors import HttpError, InvalidValueError
from ...tasks import TaskSet, cancel_all
from ..http.calls import UnreachableError
from ..wire import AdapterChange, AdapterEntry
from .commands import Commands
from .members import Members
from .registry import Registry
from .table import RoutingTable

_ACKS_TIMEOUT_S = 2.0
_UNLOAD_TIMEOUT_S = 10.0  # longer unloads go on after the answer
_AGAIN_S = 1.0
_BACK_S = 5.0  # after a restart, for engines and agents to report

_logger = logging.getLogger(__name__)


class AdapterChanges:
    """Changes to the adapters of the cluster."""

    def __init__(self, registry: Registry, table: RoutingTable, members: Members, commands: Commands) -> None:
        self._registry = registry
        self._table = table
        self._members = members
        self._commands = commands
        self._locks: dict[str, asyncio.Lock] = {}
        self._unloads: dict[str, tuple[int, set[str]]] = {}  # name: revision, targets without it
        self._tasks = TaskSet()

    def recover(self) -> None:
        """Restore adapters after a restart; unfinished changes are undone."""
        for name in self._registry.open_changes():
            self._registry.undo_change(name)
        self.show(None)
        for name, revision in self._registry.unloads().items():
            self._unloads[name] = (revision, set())

    def show(self, base_fingerprint: str | None) -> None:
        """Put all adapters into the table; those of another base model are failed."""
        bases = self._registry.base_fingerprints()
        for entry in self._registry.adapters():
            self._table.put_adapter(_shown(entry, bases[entry.name], base_fingerprint))

    def busy(self) -> frozenset[str]:
        """Return digests that are being loaded."""
        return frozenset(self._registry.open_changes().values())

    async def apply(self, change: AdapterChange) -> AdapterEntry:
        """Make a change; return the entry of the name, or its last one.

        Raises ``CorunError`` if the change fails; then nothing has changed.
        """
        lock = self._locks.setdefault(change.name, asyncio.Lock())
        async with lock:
            if change.action == "load" and change.path is not None:
                return await self._load(change, change.path)
            if change.action in ("load", "pin") and change.pinned is not None:
                return await self._pin(self._known(change.name), pinned=change.pinned)
            if change.action == "unload":
                return await self._unload(self._known(change.name))
        raise InvalidValueError("action must be load with a path, unload, or pin with pinned", param="action")

    async def retry_unloads(self) -> None:
        """Retry unloads at agents and engines that did not confirm them. Runs for ever."""
        await asyncio.sleep(_BACK_S)
        while True:
            await asyncio.sleep(_AGAIN_S)
            for name in list(self._unloads):
                await self._try_to_unload(name)

    async def close(self) -> None:
        """Cancel background work."""
        await cancel_all(*self._tasks)

    # Load and reload.

    async def _load(self, change: AdapterChange, path: str) -> AdapterEntry:
        name = change.name
        base = self._members.base
        if base is None:
            raise UnreachableError("no engine is ready to load an adapter")
        try:
            check_adapter_name(name, [base.model])
        except AdapterError as error:
            raise RequestError(str(error), param="lora_name") from error
        if change.pinned:
            self._commands.check_can_pin()
        agent_id, checked = await self._commands.check(path)
        old = self._table.adapters.get(name)
        if old is not None and old.state == READY:
            if old.digest == checked.digest:
                return await self._same(old, change, path)
            if not change.load_inplace:
                raise taken_name(name)
        was_pinned = old is not None and old.pinned
        entry = AdapterEntry(
            name=name,
            revision=self._registry.begin_change(name, checked.digest),
            digest=checked.digest,
            rank=checked.rank,
            num_bytes=checked.num_bytes,
            source=path,
            pinned=was_pinned if change.pinned is None else change.pinned,
        )
        if old is None:
            self._table.put_adapter(msgspec.structs.replace(entry, state=LOADING))
        try:
            first = await self._serve_on_one(entry, agent_id)
            self._registry.end_change(entry, base.base_fingerprint)
        except BaseException:
            self._undo(name)
            raise
        self._unloads.pop(name, None)
        self._table.put_adapter(entry)
        await self._table.confirmed(_ACKS_TIMEOUT_S)
        self._tasks.begin(self._follow(entry, first))
        return entry

    async def _same(self, old: AdapterEntry, change: AdapterChange, path: str) -> AdapterEntry:
        """Update source and pin of an adapter with unchanged content."""
        entry = old
        if path != old.source:
            entry = msgspec.structs.replace(old, source=path)
            self._registry.set_entry(entry)
            self._table.put_adapter(entry)
        if change.pinned is not None and change.pinned != entry.pinned:
            entry = await self._pin(entry, pinned=change.pinned)
        return entry

    async def _serve_on_one(self, entry: AdapterEntry, agent_id: str | None) -> str:
        """Have one engine serve it, if possible at the agent with the files; return its id."""
        engines = sorted(
            self._members.open_engines(), key=lambda one: (one.agent_id != agent_id, one.engine_id)
        )
        failed = UnreachableError("no engine is ready to load an adapter")
        for engine in engines:
            try:
                await self._commands.ensure(engine.engine_id, entry)
            except HttpError as error:
                if error.status < 500:
                    raise
                failed = UnreachableError(f"no engine could load {entry.name!r}: {error}")
            else:
                return engine.engine_id
        raise failed

    def _undo(self, name: str) -> None:
        """Restore the name's former entry, at a new revision; without one, unload the name."""
        before = self._registry.undo_change(name)
        if before is not None:
            self._table.put_adapter(before)
            return
        revision = self._registry.unloads()[name]
        self._table.remove_adapter(name, revision)
        self._unloads[name] = (revision, set())
        self._tasks.begin(self._try_to_unload(name))

    async def _follow(self, entry: AdapterEntry, first: str) -> None:
        """Load the new content at the other engines that serve the name, one by one."""
        for engine in self._members.open_engines():
            if engine.engine_id == first:
                continue
            if self._table.adapters.get(entry.name) != entry:
                return  # it has changed again
            try:
                state = await self._commands.state(engine.engine_id)
                if any(one.name == entry.name for one in state.adapters):
                    await self._commands.ensure(engine.engine_id, entry)
            except CorunError as error:
                # The engine loads the new content with the next request for it.
                _logger.warning(
                    "engine %s has not loaded the new %r: %s", engine.engine_id, entry.name, error
                )

    # Unload and pin.

    async def _unload(self, entry: AdapterEntry) -> AdapterEntry:
        revision = self._registry.unload(entry.name)
        self._unloads[entry.name] = (revision, set())
        self._table.remove_adapter(entry.name, revision)
        await self._table.confirmed(_ACKS_TIMEOUT_S)
        try:
            async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                await self._send_unloads(entry.name)
        except (HttpError, TimeoutError) as error:
            _logger.warning(
                "adapter %r is unloaded, but not at all engines yet (will retry): %s", entry.name, error
            )
        return entry

    async def _try_to_unload(self, name: str) -> None:
        try:
            await self._send_unloads(name)
        except HttpError as error:
            _logger.debug("%s is not unloaded everywhere yet: %s", name, error)

    async def _send_unloads(self, name: str) -> None:
        """Unload at targets that have not confirmed it. Raises the first error, after all."""
        if name not in self._unloads:
            return  # it was loaded again
        revision, notified = self._unloads[name]
        targets = self._commands.targets()
        failed: HttpError | None = None
        for target in sorted(targets - notified):
            try:
                await self._commands.unload(target, name, revision)
            except HttpError as error:
                failed = failed or error
            else:
                notified.add(target)
        if failed is not None:
            raise failed
        if self._unloads.get(name) == (revision, notified):
            del self._unloads[name]
            self._registry.unloaded(name, revision)

    async def _pin(self, before: AdapterEntry, *, pinned: bool) -> AdapterEntry:
        """Pin at all targets; engines that load it later pin it too. A refusal undoes the pin."""
        if pinned:
            self._commands.check_can_pin()
        entry = msgspec.structs.replace(before, pinned=pinned)
        self._registry.set_entry(entry)
        self._table.put_adapter(entry)
        for target in sorted(self._commands.targets()):
            try:
                await self._commands.pin(target, entry.name, pinned=pinned)
            except HttpError as error:
                if error.status < 500:
                    self._registry.set_entry(before)
                    self._table.put_adapter(before)
                    raise
                _logger.warning("%s cannot change the pin of %r now: %s", target, entry.name, error)
        return entry

    def _known(self, name: str) -> AdapterEntry:
        entry = self._registry.adapter(name)
        if entry is None:
            names = [one.name for one in self._registry.adapters()]
            raise unknown_name(name, names, param="lora_name")
        return entry


def _shown(entry: AdapterEntry, base: str, base_now: str | None) -> AdapterEntry:
    if base_now in (None, base):
        return entry
    reason = f"it was loaded over the base model {base}, and the engines serve {base_now}"
    return msgspec.structs.replace(entry, state=FAILED, reason=reason)
