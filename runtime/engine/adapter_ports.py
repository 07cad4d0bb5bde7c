"""What the adapter manager needs of the engine core and of the host's memory."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..adapter import AdapterFacts
from ..adapters.info import Residency
from ..adapters.registry import AdapterVersion
from ..memory.registrations import HostRoom
from ..plan import AdapterId, HostPlaceId
from .residency import Changed


class AdapterHost(Protocol):
    """What the manager tells the host's memory."""

    def evict(self, place_ids: Iterable[HostPlaceId]) -> None:
        """Take adapters out of it."""
        ...

    def remove_content(self, digest: str) -> None:
        """No version has this content any more."""
        ...


class AdapterResidency(Protocol):
    """What the manager asks of the engine core."""

    def drop_adapter(self, adapter_id: AdapterId) -> None:
        """Evict a version for good."""
        ...

    def check_pin(self, num_bytes: int, other_bytes: int, replaced: AdapterId | None) -> None:
        """Raise ``RequestError`` unless so much may be pinned, in place of a version.

        ``other_bytes``: of an adapter that a request may need beside.
        """
        ...

    def pin_adapter(self, adapter_id: AdapterId, facts: AdapterFacts) -> None:
        """Keep a version on the device, for which there is room."""
        ...

    def unpin_adapter(self, adapter_id: AdapterId) -> None:
        """It may leave the device again."""
        ...

    def take_changed_adapters(self) -> Changed:
        """Versions and contents that may be elsewhere than at the last call."""
        ...

    def residency(self, version: AdapterVersion) -> Residency:
        """Where a version is now."""
        ...

    def place_registration(self, layer_bytes: Sequence[int]) -> HostRoom:
        """Make room on the host for an adapter that is being read."""
        ...

    def end_registration(self, place_id: HostPlaceId, digest: str | None) -> None:
        """It is there, with this content, or is not."""
        ...

    def forget_content(self, digest: str) -> None:
        """No version has this content any more."""
        ...
