"""The front end's copy of the engine's registry of adapters.

HTTP and Python look names up here before they call the engine. The engine decides, as the copy is
as old as its last message. Pure bookkeeping: names and paths.
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
        """Apply changes that the engine has published."""
        for name in removed:
            self._infos.pop(name, None)
        self._infos.update({info.name: info for info in changed})

    def get(self, name: str) -> AdapterInfo | None:
        """Return an adapter in any state, or None."""
        return self._infos.get(name)

    def list(self) -> list[AdapterInfo]:
        """Return all adapters, by name."""
        return sorted(self._infos.values(), key=lambda info: info.name)

    def ready_path(self, name: str) -> str | None:
        """Return the path of an adapter that is ready, or None."""
        info = self._infos.get(name)
        return None if info is None or info.state != READY else info.path

    def __contains__(self, name: object) -> bool:
        """Whether an adapter in any state has this name."""
        return name in self._infos

    def check_known(self, name: str, *, param: str = "lora_request") -> None:
        """Raise ``UnknownModelError`` unless an adapter in any state has this name."""
        if name not in self._infos:
            raise unknown_name(name, self._infos, param=param)

    def check_usable(self, name: str, *, param: str = "lora_request") -> None:
        """Raise ``UnknownModelError`` or ``AdapterUnavailableError`` unless requests can use it.

        An adapter that is loading can be used: the engine knows whether it still loads.
        """
        self.check_known(name, param=param)
        info = self._infos[name]
        if info.state in (FAILED, DRAINING):
            raise unavailable_adapter(name, info.state, info.reason, param=param)


def adapter_path(lora: LoRARequest) -> str:
    """Return an adapter's path as the engine needs it, in any working directory."""
    return os.path.abspath(os.path.expanduser(lora.lora_path))


def check_lora_request(lora: object) -> LoRARequest:
    """Return ``lora``; raises ``RequestError`` for another type, or without name or path."""
    if not isinstance(lora, LoRARequest):
        raise RequestError(
            f"lora_request is {lora!r}, expected a LoRARequest, a LoRAMix, an adapter's name or None",
            param="lora_request",
        )
    if not lora.lora_name or not lora.lora_path:
        raise RequestError("a LoRARequest needs a name and a path", param="lora_request")
    return lora
