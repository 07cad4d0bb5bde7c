"""Starts without the parts of torch and scipy that no engine uses.

transformers imports torch's compiler, its distributed tensors and scipy's optimisers for
decorators, training and several processes: a third of the start time. Code that uses them directly
still gets them.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_NOT_USED = "scipy"  # optional for transformers


@contextmanager
def without_compiler() -> Iterator[None]:
    """Allow importing transformers and building a model as if torch had no compiler.

    For a process that compiles nothing: functions defined inside are not marked for exclusion from
    torch.compile, and transformers permanently assumes one device. Has no effect if transformers is
    already imported.
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
        placeholder.restore()


class _Compiler(ModuleType):
    """Replaces the compiler while its decorators are applied; other attributes are the real ones.

    Its submodules can be imported: they do not need the package.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [f"{path}/_dynamo" for path in torch.__path__]

    @staticmethod
    def disable(function: Any = None, *_options: Any, **_named: Any) -> Any:
        """Decorate nothing: nothing is compiled, so nothing needs to be excluded."""
        return _unchanged if function is None else function

    assume_constant_result = allow_in_graph = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.restore()
        return getattr(importlib.import_module(_COMPILER), name)

    def restore(self) -> None:
        """Restore the real module, which is imported on the next use. Idempotent."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
