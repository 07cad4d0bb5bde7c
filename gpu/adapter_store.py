"""Adapters on the host: read once, digested on the way, and kept packed in the arena.

Joins the arena, which knows memory, with whoever opens adapter directories and with the layout of
matrices. On a CPU without a link the arena is the device's memory, too; otherwise loads copy from
it. Knows nothing of requests or of the device.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..runtime.adapters.resolved import AdapterReader
from ..runtime.errors import AdapterError, ResourceError
from ..shm.arena import HostArena
from ..shm.arena_entry import ArenaEntry, ArenaFullError, entry_bytes
from ..shm.errors import ShmError
from .device.host_memory import TorchDevice
from .lora.adapter_layout import AdapterLayout, GroupPlan

_LOG = logging.getLogger(__name__)


class StoreBusyError(ResourceError):
    """There is no room in the arena now, because of what is in use."""


# Opens a PEFT directory; raises ``AdapterError``.
OpenSource = Callable[[str], AdapterReader]


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """What is known of an adapter once it has been read."""

    digest: str
    rank: int  # the largest of its targets
    plans: tuple[GroupPlan, ...]
    host_bytes: int  # in the arena


class HostAdapter:
    """One adapter in the arena, referenced until ``release``."""

    def __init__(self, arena: HostArena, entry: ArenaEntry, parts: Sequence[torch.Tensor]) -> None:
        """``parts``: the bytes of each region, uint8."""
        self._arena = arena
        self._entry = entry
        self.places = entry.regions
        self.parts = tuple(parts)
        self._is_released = False

    def release(self) -> None:
        """End the reference: nobody reads the regions on its account any more. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self.parts = ()
            self._arena.release(self._entry)


class AdapterStore:
    """Owns the arena. ``register`` and ``fetch`` may run in different threads."""

    def __init__(
        self, arena: HostArena, layout: AdapterLayout, open_source: OpenSource,
        device: TorchDevice, *, is_device_memory: bool,
    ) -> None:  # fmt: skip
        """Takes ``arena`` over.

        ``is_device_memory``: what does not fit now may find room in the one budget later.
        """
        self.layout = layout
        self._arena = arena
        self._open = open_source
        self._is_device_memory = is_device_memory
        self._memory = device.register(arena.segment.pages, name="adapters")
        self._bytes: torch.Tensor | None = self._memory.tensor(
            0, (arena.segment.num_bytes,), torch.uint8
        )

    def register(self, path: str) -> StoredFacts:
        """Read and check an adapter, and keep it in the arena if there is room.

        Raises ``AdapterError`` naming what is wrong, or that it can never fit.
        """
        with self._open(path) as source:
            plans = self.layout.plan(source.adapter)
            specs = [plan.spec for plan in plans]
            num_bytes = entry_bytes(specs)
            try:
                entry = self._arena.reserve(specs, is_optional=True)
            except ShmError as error:
                full_for_good = isinstance(error, ArenaFullError) and error.is_for_good
                if full_for_good and not self._is_device_memory:
                    raise AdapterError(str(error)) from error
                _LOG.debug("%s is checked and not kept: %s", path, error)
                self.layout.check(source.tensors())
            else:
                entry = self._fill(entry, plans, source, expected=None, path=path)
                self._arena.release(entry)
            return StoredFacts(source.digest, source.adapter.max_rank, plans, num_bytes)

    def fetch(self, digest: str, path: str) -> HostAdapter:
        """Refer to the adapter with this content; reads it again if it is not in the arena.

        Raises ``AdapterError`` if the files are not what they were, ``ResourceError`` if there is
        no room, ``StoreBusyError`` if there may be soon.
        """
        entry = self._arena.acquire(digest)
        if entry is None:
            entry = self._read_again(digest, path)
        return HostAdapter(self._arena, entry, self._parts(entry))

    def fetch_present(self, digest: str) -> HostAdapter | None:
        """Refer to the adapter with this content if it is in the arena."""
        entry = self._arena.acquire(digest)
        return None if entry is None else HostAdapter(self._arena, entry, self._parts(entry))

    def is_present(self, digest: str) -> bool:
        """Whether the adapter with this content is in the arena now."""
        return self._arena.contains(digest)

    def forget(self, digest: str) -> None:
        """Nobody will ask for this content any more."""
        self._arena.discard(digest)

    def keep_within(self, num_bytes: int) -> None:
        """Keep what is not in use only while all adapters take no more than this."""
        self._arena.keep_within(num_bytes)

    def close(self) -> None:
        """Give the arena up, with nothing under way on it. Idempotent.

        Its memory is free when the last tensor over it is gone.
        """
        if self._bytes is None:
            return
        self._bytes = None
        self._memory.close()
        try:
            self._arena.close()
        except ShmError as error:
            _LOG.warning("%s", error)

    def _read_again(self, digest: str, path: str) -> ArenaEntry:
        with self._open(path) as source:
            plans = self.layout.plan(source.adapter)
            try:
                entry = self._arena.reserve([plan.spec for plan in plans])
            except ArenaFullError as error:
                kind = ResourceError if error.is_for_good else StoreBusyError
                raise kind(f"{path}: {error}") from error
            except ShmError as error:
                raise ResourceError(f"{path}: {error}") from error
            return self._fill(entry, plans, source, expected=digest, path=path)

    def _fill(
        self, entry: ArenaEntry, plans: Sequence[GroupPlan], source: AdapterReader,
        *, expected: str | None, path: str,
    ) -> ArenaEntry:  # fmt: skip
        """Write the adapter to ``entry`` and publish it, or give it up."""
        try:
            self.layout.fill(plans, self._parts(entry), source.tensors())
            if expected is not None and source.digest != expected:
                raise AdapterError(
                    f"the files in {path} have changed since the adapter was registered; register "
                    "it again to serve the new content"
                )
        except BaseException:
            self._arena.abandon(entry)
            raise
        return self._arena.publish(entry, source.digest)

    def _parts(self, entry: ArenaEntry) -> list[torch.Tensor]:
        assert self._bytes is not None, "the store is closed"
        return [self._bytes[r.offset : r.offset + r.num_bytes] for r in entry.regions]
