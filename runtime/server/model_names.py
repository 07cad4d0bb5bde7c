"""Resolves a request's model: a name of the base model, an adapter, or base:adapter."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ..adapters.info import AdapterInfo
from ..adapters.mix import LoRAMix
from ..adapters.names import LOADING, READY, unknown_name
from ..frontend.lora_directory import LoraDirectory


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model that a request names."""

    shown_name: str  # echoed in the answer
    adapter: str | LoRAMix | None  # None = the base model


class ModelNames:
    """The names over HTTP: the base model's served names, and the adapters'."""

    def __init__(self, base_names: Sequence[str]) -> None:
        assert base_names
        self.base_names = tuple(base_names)

    @property
    def base(self) -> str:
        """The first served name: the base model's id."""
        return self.base_names[0]

    def resolve(self, model: str | None, loras: LoraDirectory) -> ResolvedModel:
        """Return the model that ``model`` names; None = the base model.

        Raises ``UnknownModelError`` with near names, or ``AdapterUnavailableError`` with the
        reason for an adapter that failed to load or is being removed.
        """
        meant = self.adapter_meant(model, loras)
        if model is None or meant is None:
            return ResolvedModel(self.base if model is None else model, None)
        if meant not in loras:
            known = [*self.base_names, *(info.name for info in loras.list())]
            raise unknown_name(model, known, meant=meant)
        loras.check_usable(meant)
        return ResolvedModel(model, meant)

    def adapter_meant(self, model: str | None, loras: Container[str]) -> str | None:
        """Return the adapter that ``model`` names, known or not; None = the base model."""
        if model is None or model in self.base_names:
            return None
        return model if model in loras else self._without_base(model)

    def _without_base(self, model: str) -> str:
        for base in self.base_names:
            if model.startswith(base + ":"):
                return model[len(base) + 1 :]
        return model


def is_listed(adapter: AdapterInfo) -> bool:
    """Whether ``/v1/models`` shows the adapter: a client that picks it gets an answer."""
    return adapter.state in (READY, LOADING)
