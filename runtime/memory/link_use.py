"""Bytes and busy time of a link, by direction and kind of content. Pure account keeping."""

from typing import NamedTuple

from ...profiles.link import Direction
from ..plan import TransferId


class LinkKey(NamedTuple):
    """Key of separate totals."""

    direction: Direction
    kind: str  # "adapter" or "kv"


class LinkTotals(NamedTuple):
    """Totals since the start."""

    num_bytes: int
    busy_s: float  # time with at least one transfer to copy


class LinkUse:
    """Counts copied bytes, and the time in which there was anything to copy."""

    def __init__(self) -> None:
        self._num_bytes: dict[LinkKey, int] = {}
        self._busy_s: dict[LinkKey, float] = {}  # up to ``_since_s``
        self._since_s: dict[LinkKey, float] = {}  # of busy keys
        self._busy: dict[LinkKey, set[TransferId]] = {}

    def changed(
        self, key: LinkKey, transfer_id: TransferId, now_s: float,
        *, is_busy: bool, new_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Record that a transfer has begun, progressed or ended.

        ``is_busy``: it has something to copy now.
        """
        busy = self._busy.setdefault(key, set())
        self._num_bytes[key] = self._num_bytes.get(key, 0) + new_bytes
        was_busy = bool(busy)
        if is_busy:
            busy.add(transfer_id)
        else:
            busy.discard(transfer_id)
        if busy and not was_busy:
            self._since_s[key] = now_s
        elif was_busy and not busy:
            self._busy_s[key] = self._busy_s.get(key, 0.0) + now_s - self._since_s.pop(key)

    def totals(self, now_s: float) -> dict[LinkKey, LinkTotals]:
        """Return the totals up to now."""
        return {
            key: LinkTotals(
                num_bytes, self._busy_s.get(key, 0.0) + now_s - self._since_s.get(key, now_s)
            )
            for key, num_bytes in self._num_bytes.items()
        }
