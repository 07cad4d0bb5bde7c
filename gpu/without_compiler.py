"""A start without the parts of torch and scipy that no engine uses.

transformers imports torch's compiler, its tensors over several devices and scipy's optimisers for
decorators, training and several processes: a third of the time of a start. What asks for them by
itself gets them.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_NOT_USED = "scipy"  # transformers does without it where it is not installed


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let transformers be imported, and a model be built, as if torch had no compiler.

    For a process that compiles nothing: functions that are defined inside are not marked as what
    torch.compile leaves alone, and transformers knows one device for good. Does nothing where
    transformers has been imported.
    """
    if _COMPILER in sys.modules or "transformers" in sys.modules:
        yield
        return
    unused = sys.modules.get(_NOT_USED)
    is_distributed_available = torch.distributed.is_available
    placeholder = _Compiler()
    sys.modules[_COMPILER] = placeholder
    sys.modules[_NOT_USED] = None  # type: ignore[assignment]  # as the import system documents it
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_distributed_available
        del sys.modules[_NOT_USED]
        if unused is not None:
            sys.modules[_NOT_USED] = unused
        placeholder.leave()


class _Compiler(ModuleType):
    """Stands for the compiler while its decorators are applied; what else it is asked for is real.

    Its modules can be imported: they do not need the package.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [f"{path}/_dynamo" for path in torch.__path__]

    @staticmethod
    def disable(function: Any = None, *_options: Any, **_named: Any) -> Any:
        """Decorate nothing: nothing is compiled that a function could be excepted from."""
        return _unchanged if function is None else function

    assume_constant_result = allow_in_graph = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_COMPILER), name)

    def leave(self) -> None:
        """Make way for the real one, which is imported when something asks for it. Idempotent."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
