"""The interfaces of the engine core and of the host's memory for the adapter manager."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..adapter import AdapterFacts
from ..adapters.registry import AdapterVersion
from ..engine_state import Residency
from ..memory.loads import HostRoom
from ..memory.report import Changed
from ..plan import AdapterId, HostPlaceId


class AdapterHost(Protocol):
    """The host's memory, as the manager uses it."""

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None: ...

    def remove_content(self, digest: str) -> None:
        """Remove a content that no version has any more."""
        ...


class AdapterResidency(Protocol):
    """The engine core, as the manager uses it."""

    def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Evict a version permanently."""
        ...

    def check_pin(self, num_bytes: int, other_bytes: int, replaced: AdapterId | None) -> None:
        """Raise ``RequestError`` unless ``num_bytes`` can be pinned, in place of ``replaced``.

        ``other_bytes``: of the largest unpinned adapter, which a request may need too.
        """
        ...

    def pin_adapter(self, adapter_id: AdapterId, facts: AdapterFacts) -> None:
        """Pin a version to the device; there must be room."""
        ...

    def unpin_adapter(self, adapter_id: AdapterId) -> None:
        """Unpin a version."""
        ...

    def take_changed_adapters(self) -> Changed:
        """Return versions and contents that may have changed level since the last call."""
        ...

    def residency(self, version: AdapterVersion) -> Residency:
        """Return where a version is now."""
        ...

    def place_registration(self, layer_bytes: Sequence[int]) -> HostRoom:
        """Make room on the host for an adapter that is being read."""
        ...

    def end_registration(self, place_id: HostPlaceId, digest: str | None) -> None:
        """It is there, with this content, or is not."""
        ...

    def drop_content(self, digest: str) -> None:
        """Remove a content that no version has any more."""
        ...
