"""Kinds of engines by name."""

from collections.abc import Mapping

from ..wire import MeasuredEngine
from .corun import CorunKind
from .kind import EngineKind
from .vllm import VllmKind

_CORUN = CorunKind()
_MEASURED: Mapping[str, EngineKind] = {"vllm": VllmKind()}  # those that do not tell what they are


def kind_of(measured: MeasuredEngine | None) -> EngineKind:
    """Of an engine of which this was measured; None = it tells itself."""
    return _CORUN if measured is None else _MEASURED[measured.server.kind]
