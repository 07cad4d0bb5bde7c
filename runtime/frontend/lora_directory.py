"""The adapters that an engine has, as a front end sees them, and what to ask to get another.

Pure bookkeeping: paths and names. Knows nothing of channels or of how adapters are loaded.
"""

import os
from collections.abc import Iterable

from ..adapters.registry import AdapterInfo
from ..errors import AdapterUnavailableError, RequestError, UnknownModelError
from ..near_names import near_names
from .outputs import LoRARequest


class LoraDirectory:
    """Adapters by name."""

    def __init__(self, infos: Iterable[AdapterInfo] = ()) -> None:
        self._infos: dict[str, AdapterInfo] = {}
        self.replace(infos)

    def replace(self, infos: Iterable[AdapterInfo]) -> None:
        """Take the list that the engine has now."""
        self._infos = {info.name: info for info in infos}

    def list(self) -> list[AdapterInfo]:
        """Return all, by name."""
        return sorted(self._infos.values(), key=lambda info: info.name)

    def has(self, lora: LoRARequest) -> bool:
        """Whether this very adapter (name and path) is registered and ready."""
        info = self._infos.get(lora.lora_name)
        if info is None or info.state != "ready":
            return False
        return os.path.realpath(info.path) == os.path.realpath(adapter_path(lora))

    def check_known(self, name: str) -> None:
        """Raise ``UnknownModelError`` unless an adapter has this name."""
        if name not in self._infos:
            hint = near_names(name, self._infos, joint=", ")
            raise UnknownModelError(f"no adapter is named {name!r}{hint}", param="lora_request")

    def check_name(self, name: str) -> None:
        """Raise unless requests can name this adapter."""
        self.check_known(name)
        info = self._infos[name]
        if info.state == "failed":
            raise AdapterUnavailableError(
                f"adapter {name!r} failed to load: {info.reason}", param="lora_request"
            )


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
