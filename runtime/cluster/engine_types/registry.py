"""Kinds of engines by name."""

from collections.abc import Mapping

from ..wire import MeasuredEngine
from .corun import CorunEngineType
from .engine_type import EngineType
from .vllm import VllmEngineType

_CORUN = CorunEngineType()
_MEASURED: Mapping[str, EngineType] = {
    "vllm": VllmEngineType()
}  # those that do not tell what they are


def engine_type_of(measured: MeasuredEngine | None) -> EngineType:
    """Of an engine of which this was measured; None = it tells itself."""
    return _CORUN if measured is None else _MEASURED[measured.server.kind]
