"""The mixes of adapters that requests have named.

Requests name mixes by their parts, and the engine registers them as adapters. A mix is made of the
versions in service of its parts, and is removed as soon as one of them is replaced or removed: its
running requests finish, and the next request makes another one.
"""

from collections.abc import Callable

from ..adapters.mix import LoRAMix, conventions_of_mix
from ..adapters.registry import AdapterRegistry
from ..adapters.resolved import MixSource, PartSource
from ..errors import AdapterChangedError, RequestError
from .adapter_reading import ReadJob

MAX_IDLE_MIXES = 64  # registered ones that no request uses


class AdapterMixes:
    """The registered mixes; owned by the adapter manager."""

    def __init__(
        self,
        registry: AdapterRegistry,
        must_read: Callable[[str], bool],
        begin_reading: Callable[[ReadJob], None],
        unregister: Callable[[str], None],
    ) -> None:
        """``must_read``: whether a part must be read first; begins it."""
        self._registry = registry
        self._must_read = must_read
        self._begin_reading = begin_reading
        self._unregister = unregister
        self._mixes: dict[str, LoRAMix] = {}  # by name, the least recently used first
        self._has_read = False  # reads have ended since ``drop_unused``

    def must_wait(self, name: str, mix: LoRAMix) -> bool:
        """Whether requests must wait for a mix or its parts to be read; begins it."""
        if name in self._mixes:
            return self._registry.is_loading(name)
        parts = [part for part, _ in mix.parts]
        if any([self._must_read(part) or self._registry.is_loading(part) for part in parts]):
            return True
        try:
            source = self._source(mix)
        except RequestError:
            return False  # ``use`` raises it
        self._begin_reading(ReadJob(None, name, source))
        self._mixes[name] = mix
        return True

    def use(self, name: str) -> None:
        """A request begins to use ``name``; nothing happens if this is no mix.

        Raises the error of a part that cannot be used, or ``AdapterChangedError`` if the mix was
        removed while the request waited.
        """
        mix = LoRAMix.named(name)
        if mix is None:
            return
        if name not in self._mixes:
            self._source(mix)
            raise AdapterChangedError(
                f"adapters of the mix {name!r} were loaded again before the request began; send it again",
                param="lora",
            )
        self._mixes[name] = self._mixes.pop(name)

    def note_read(self, name: str) -> bool:
        """The read of ``name`` has ended. Return whether it is a mix, for which to poll again.

        The requests that wait for it begin before the next poll.
        """
        self._has_read |= name in self._mixes
        return name in self._mixes

    def drop_unused(self) -> None:
        """Remove mixes that failed, and old ones that no request uses beyond ``MAX_IDLE_MIXES``."""
        if not self._has_read:
            return
        self._has_read = False
        idle = [name for name in self._mixes if self._registry.is_idle(name)]
        serving = [name for name in idle if self._registry.serving(name) is not None]
        for name in {*idle}.difference(serving[-MAX_IDLE_MIXES:]):
            self._drop(name)

    def drop_with(self, part: str) -> None:
        """Remove the mixes with this adapter, which is replaced or removed."""
        for name in [name for name, mix in self._mixes.items() if part in dict(mix.parts)]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        del self._mixes[name]
        self._unregister(name)

    def _source(self, mix: LoRAMix) -> MixSource:
        """Return what the mix is read from. Raises ``RequestError``."""
        parts, own = [], []
        for name, scale in mix.parts:
            version = self._registry.resolve(name)
            assert isinstance(version.path, str), "a part is no mix"
            parts.append(PartSource(name, version.path, version.content, scale))
            own.append((name, version.conventions))
        return MixSource(tuple(parts), conventions_of_mix(own))
