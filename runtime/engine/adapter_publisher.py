"""Publishes the state of adapters to front ends: all of them at first, then changes."""

import logging
from collections.abc import Iterable

from ..adapters.info import AdapterInfo
from ..adapters.names import DRAINING, READY
from ..adapters.registry import AdapterRegistry
from .adapter_ports import AdapterResidency
from .messages import AdaptersChanged

_logger = logging.getLogger(__name__)


class AdapterPublisher:
    """Owned by the adapter manager."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._published: dict[str, AdapterInfo] = {}  # as front ends know them
        self._marked: set[str] = set()  # names of adapters that may have changed
        self.must_publish = False  # new requests depend on a change

    def mark(self, names: Iterable[str], *, must_publish: bool = False) -> None:
        """Mark adapters that may have changed; ``must_publish``: new requests depend on it."""
        self._marked.update(names)
        self.must_publish |= must_publish

    def publish_all(self, device: AdapterResidency) -> tuple[AdapterInfo, ...]:
        """Return all registered adapters; later changes are returned by ``publish``."""
        infos = self._registry.infos(device.residency)
        before, self._published = self._published, {info.name: info for info in infos}
        for info in infos:
            _log_change(info.name, before.get(info.name), info)
        return infos

    def publish(self, device: AdapterResidency) -> AdaptersChanged | None:
        """Return changes since the last publication, or None. O(marked adapters)."""
        changed = device.take_changed_adapters()
        self._marked |= self._registry.names_of(changed.adapter_ids, changed.digests)
        infos, removed = list[AdapterInfo](), list[str]()
        for name in sorted(self._marked):
            before, info = self._published.get(name), self._registry.info(name, device.residency)
            if info == before:
                continue
            _log_change(name, before, info)
            if info is None:
                del self._published[name]
                removed.append(name)
            else:
                self._published[name] = info
                infos.append(info)
        self._marked.clear()
        self.must_publish = False
        return AdaptersChanged(tuple(infos), tuple(removed)) if infos or removed else None


def _log_change(name: str, before: AdapterInfo | None, now: AdapterInfo | None) -> None:
    """Log an adapter's new level, and parts of its file that are not used, if they have changed."""
    if now is not None and now.left_out and (before is None or before.left_out != now.left_out):
        _logger.info(
            "adapter %r is served without %s, which do not affect text answers",
            name, "; ".join(now.left_out),
        )  # fmt: skip
    if _logger.isEnabledFor(logging.DEBUG) and (place := _place(now)) != _place(before):
        _logger.debug("adapter %r: %s -> %s", name, _place(before), place)


def _place(info: AdapterInfo | None) -> str:
    """Return the state and level as text."""
    if info is None:
        return "not registered"
    if info.state not in (READY, DRAINING):
        return info.state
    residency = info.residency
    if residency.level == "partial":
        groups = f"{residency.num_groups_loaded}/{residency.num_groups}"
        return f"{info.state}, partial {groups}"
    return f"{info.state}, {residency.level}"
