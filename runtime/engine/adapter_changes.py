"""What front ends know of the adapters, and what is new to them."""

from collections.abc import Iterable

from ..adapters.info import AdapterInfo
from ..adapters.registry import AdapterRegistry
from .adapter_ports import AdapterResidency
from .messages import AdaptersChanged
from .residency import log_change


class AdapterChanges:
    """Owned by the adapter manager."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._published: dict[str, AdapterInfo] = {}  # what others know
        self._marked: set[str] = set()  # names of which something may be otherwise
        self.must_publish = False  # requests to come are made with what has changed

    def mark(self, names: Iterable[str], *, must_publish: bool = False) -> None:
        """Something may be otherwise of these adapters."""
        self._marked.update(names)
        self.must_publish |= must_publish

    def publish_all(self, device: AdapterResidency) -> tuple[AdapterInfo, ...]:
        """All registered adapters; what becomes of them from now on is told by ``take``."""
        infos = self._registry.infos(device.residency)
        before, self._published = self._published, {info.name: info for info in infos}
        for info in infos:
            log_change(info.name, before.get(info.name), info)
        return infos

    def publish(self, device: AdapterResidency) -> AdaptersChanged | None:
        """What is otherwise than it was told. O(what may have changed)."""
        changed = device.take_changed_adapters()
        self._marked |= self._registry.names_of(changed.adapter_ids, changed.digests)
        infos, removed = list[AdapterInfo](), list[str]()
        for name in sorted(self._marked):
            before, info = self._published.get(name), self._registry.info(name, device.residency)
            if info == before:
                continue
            log_change(name, before, info)
            if info is None:
                del self._published[name]
                removed.append(name)
            else:
                self._published[name] = info
                infos.append(info)
        self._marked.clear()
        self.must_publish = False
        return AdaptersChanged(tuple(infos), tuple(removed)) if infos or removed else None
