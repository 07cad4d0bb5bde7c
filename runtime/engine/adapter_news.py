"""What front ends know of the adapters, and what is new to them."""

from collections.abc import Iterable

from ..adapters.info import AdapterInfo
from ..adapters.registry import AdapterRegistry
from .adapter_ports import AdapterResidency
from .messages import AdaptersChanged
from .residency import log_change


class AdapterNews:
    """Owned by the adapter manager."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._told: dict[str, AdapterInfo] = {}  # what others know
        self._changed: set[str] = set()  # names of which something may be otherwise
        self.is_urgent = False  # requests to come are made with what has changed

    def changed(self, names: Iterable[str], *, is_urgent: bool = False) -> None:
        """Something may be otherwise of these adapters."""
        self._changed.update(names)
        self.is_urgent |= is_urgent

    def all(self, device: AdapterResidency) -> tuple[AdapterInfo, ...]:
        """All registered adapters; what becomes of them from now on is told by ``take``."""
        infos = self._registry.infos(device.residency)
        before, self._told = self._told, {info.name: info for info in infos}
        for info in infos:
            log_change(info.name, before.get(info.name), info)
        return infos

    def take(self, device: AdapterResidency) -> AdaptersChanged | None:
        """What is otherwise than it was told. O(what may have changed)."""
        changed = device.take_changed_adapters()
        self._changed |= self._registry.names_of(changed.adapter_ids, changed.digests)
        infos, removed = list[AdapterInfo](), list[str]()
        for name in sorted(self._changed):
            before, info = self._told.get(name), self._registry.info(name, device.residency)
            if info == before:
                continue
            log_change(name, before, info)
            if info is None:
                del self._told[name]
                removed.append(name)
            else:
                self._told[name] = info
                infos.append(info)
        self._changed.clear()
        self.is_urgent = False
        return AdaptersChanged(tuple(infos), tuple(removed)) if infos or removed else None
