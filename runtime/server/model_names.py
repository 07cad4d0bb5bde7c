"""Which model a request means: the base under its served names, an adapter, or base:adapter."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..adapters.registry import AdapterInfo
from ..errors import AdapterUnavailableError, UnknownModelError
from ..near_names import near_names

MAX_NAMES_SHOWN = 5
_SERVED_STATES = ("ready", "loading")


@dataclass(frozen=True, slots=True)
class Target:
    """What a request's ``model`` stands for."""

    shown_name: str  # echoed in the answer
    adapter_name: str | None  # None = the base model


class ModelNames:
    """Resolves names against the base model's served names and the adapters of the moment."""

    def __init__(self, base_names: Sequence[str]) -> None:
        assert base_names
        self.base_names = tuple(base_names)

    @property
    def base(self) -> str:
        """The first served name: the base model's id."""
        return self.base_names[0]

    def resolve(self, model: str | None, adapters: Sequence[AdapterInfo]) -> Target:
        """Return the target of ``model``; a request without one means the base model.

        Raises ``UnknownModelError`` with near names, or ``AdapterUnavailableError`` with the
        reason for an adapter that failed to load or is being removed.
        """
        if model is None:
            return Target(self.base, None)
        if model in self.base_names:
            return Target(model, None)
        by_name = {adapter.name: adapter for adapter in adapters}
        adapter = by_name.get(model) or by_name.get(self._without_base(model))
        if adapter is None:
            raise UnknownModelError(self._unknown(model, list(by_name)), param="model")
        if adapter.state not in _SERVED_STATES:
            why = f": {adapter.reason}" if adapter.reason else ""
            raise AdapterUnavailableError(
                f"the adapter {adapter.name!r} is {adapter.state}{why}", param="model"
            )
        return Target(model, adapter.name)

    def _without_base(self, model: str) -> str:
        for base in self.base_names:
            if model.startswith(base + ":"):
                return model[len(base) + 1 :]
        return ""

    def _unknown(self, model: str, adapter_names: list[str]) -> str:
        known = [*self.base_names, *adapter_names]
        shown = model if len(model) <= 100 else model[:99] + "…"
        message = f"there is no model or adapter {shown!r} here"
        wanted = self._without_base(model) or model
        hint = near_names(wanted, known, cutoff=0.5)
        if hint:
            return message + hint
        listed = ", ".join(repr(name) for name in known[:MAX_NAMES_SHOWN])
        more = len(known) - MAX_NAMES_SHOWN
        return f"{message}; served are {listed}" + (f" and {more} more" if more > 0 else "")


def is_listed(adapter: AdapterInfo) -> bool:
    """Whether ``/v1/models`` shows the adapter: a client that picks it gets an answer."""
    return adapter.state in _SERVED_STATES
