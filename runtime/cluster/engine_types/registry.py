"""Engine types by name."""

from collections.abc import Mapping

from ..wire import ForeignEngine
from .corun import CorunEngineType
from .engine_type import EngineType
from .vllm import VllmEngineType

_CORUN = CorunEngineType()
_FOREIGN: Mapping[str, EngineType] = {"vllm": VllmEngineType()}


def engine_type_of(foreign: ForeignEngine | None) -> EngineType:
    """Return an engine's type; ``foreign``: None = an engine of corun."""
    return _CORUN if foreign is None else _FOREIGN[foreign.kind]
