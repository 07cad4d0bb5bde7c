"""Engine types by name."""

from collections.abc import Mapping

from ..wire import MeasuredEngine
from .corun import CorunEngineType
from .engine_type import EngineType
from .vllm import VllmEngineType

_CORUN = CorunEngineType()
_MEASURED: Mapping[str, EngineType] = {
    "vllm": VllmEngineType()
}  # types that need a measured profile


def engine_type_of(measured: MeasuredEngine | None) -> EngineType:
    """Return an engine's type; ``measured``: None = an engine of corun."""
    return _CORUN if measured is None else _MEASURED[measured.server.kind]
