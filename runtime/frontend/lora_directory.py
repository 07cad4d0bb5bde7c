"""The adapters that an engine has, as its front end sees them: a mirror of the engine's registry.

HTTP and Python ask here before they trouble the engine, which has the last word: the mirror is as
old as the last message. Pure bookkeeping: names and paths.
"""

import os
from collections.abc import Iterable

from ..adapters.info import AdapterInfo
from ..adapters.names import DRAINING, FAILED, READY, unavailable_adapter, unknown_name
from ..errors import RequestError
from .outputs import LoRARequest


class LoraDirectory:
    """Adapters by name."""

    def __init__(self, infos: Iterable[AdapterInfo] = ()) -> None:
        self._infos = {info.name: info for info in infos}

    def update(self, changed: Iterable[AdapterInfo], removed: Iterable[str] = ()) -> None:
        """Take what the engine tells of some."""
        for name in removed:
            self._infos.pop(name, None)
        self._infos.update({info.name: info for info in changed})

    def get(self, name: str) -> AdapterInfo | None:
        """Return one, in whatever state."""
        return self._infos.get(name)

    def list(self) -> list[AdapterInfo]:
        """Return all, by name."""
        return sorted(self._infos.values(), key=lambda info: info.name)

    def has(self, lora: LoRARequest) -> bool:
        """Whether this very adapter (name and path) is registered and ready."""
        info = self._infos.get(lora.lora_name)
        if info is None or info.state != READY:
            return False
        return os.path.realpath(info.path) == os.path.realpath(adapter_path(lora))

    def __contains__(self, name: object) -> bool:
        """Whether an adapter has this name, in whatever state."""
        return name in self._infos

    def check_known(self, name: str, *, param: str = "lora_request") -> None:
        """Raise ``UnknownModelError`` unless an adapter has this name, in whatever state."""
        if name not in self._infos:
            raise unknown_name(name, self._infos, param=param)

    def check_usable(self, name: str) -> None:
        """Raise ``UnknownModelError`` or ``AdapterUnavailableError`` unless requests may name it.

        They may name one that is loading: the engine knows whether it still is.
        """
        self.check_known(name)
        info = self._infos[name]
        if info.state in (FAILED, DRAINING):
            raise unavailable_adapter(name, info.state, info.reason)


def adapter_path(lora: LoRARequest) -> str:
    """Return the path of an adapter as the engine must hear it, from whatever directory it runs."""
    return os.path.abspath(os.path.expanduser(lora.lora_path))


def check_lora_request(lora: object) -> LoRARequest:
    """Return ``lora``; raises ``RequestError`` if it is something else or names nothing."""
    if not isinstance(lora, LoRARequest):
        raise RequestError(
            f"lora_request is {lora!r}, expected a LoRARequest, an adapter's name or None",
            param="lora_request",
        )
    if not lora.lora_name or not lora.lora_path:
        raise RequestError("a LoRARequest needs a name and a path", param="lora_request")
    return lora
