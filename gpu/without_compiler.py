"""Starts without the parts of torch and scipy that no engine uses.

transformers imports torch's compiler, its distributed tensors and scipy's optimisers for
decorators, training and several processes: a third of the start time. Code that uses them directly
still gets them.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
# The submodules that transformers imports. They do not need the package.
_INDEPENDENT = frozenset({"torch._dynamo._trace_wrapped_higher_order_op"})


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
    is_distributed_available = torch.distributed.is_available
    placeholder, finder = _Compiler(), _CompilerFinder()
    sys.modules[_COMPILER] = placeholder
    sys.meta_path.insert(0, finder)
    torch.distributed.is_available = lambda: False
    try:
        with _scipy_left_out(), _models_listed_once():
            yield
    finally:
        torch.distributed.is_available = is_distributed_available
        sys.meta_path.remove(finder)
        placeholder.restore()


@contextmanager
def _scipy_left_out() -> Iterator[None]:
    """Let transformers see no scipy, which is optional for it. Other packages can import it."""
    from transformers import utils

    is_scipy_available = utils.is_scipy_available
    utils.is_scipy_available = lambda: False
    try:
        yield
    finally:
        utils.is_scipy_available = is_scipy_available


@contextmanager
def _models_listed_once() -> Iterator[None]:
    """Let transformers.models use the list that transformers has made of the same files.

    To list what they export, each reads the sources of all models.
    """
    from transformers.utils import import_utils

    models = Path(import_utils.__file__).parents[1] / "models"
    define = import_utils.define_import_structure

    def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path) != models / "__init__.py":
            return define(module_path, prefix)
        listed = define(models, prefix="models")  # as transformers calls it, so it is cached
        return {
            needed: {
                name.removeprefix("models."): exported
                for name, exported in modules.items()
                if name.startswith("models.")
            }
            for needed, modules in listed.items()
        }

    import_utils.define_import_structure = define_import_structure
    try:
        yield
    finally:
        import_utils.define_import_structure = define


class _Compiler(ModuleType):
    """Replaces the compiler while its decorators are applied.

    Other attributes are those of the real compiler, and so are its submodules: torchvision imports
    one, and transformers imports torchvision if it is installed.
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


class _CompilerFinder(MetaPathFinder):
    """Imports the real compiler before a submodule that needs it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of the imported submodule while the placeholder is there, or None."""
        placeholder = sys.modules.get(_COMPILER)
        is_submodule = name.startswith(f"{_COMPILER}.") and name not in _INDEPENDENT
        if not is_submodule or not isinstance(placeholder, _Compiler):
            return None
        placeholder.restore()
        importlib.import_module(_COMPILER)
        module = importlib.import_module(name)
        assert module.__spec__ is not None
        return ModuleSpec(name, _Imported(module, module.__spec__))


class _Imported(Loader):
    """Hands a module that is imported already to the import that waits for it."""

    def __init__(self, module: ModuleType, spec: ModuleSpec) -> None:
        self._module = module
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module. ``spec`` is the finder's."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing, and give the module its own spec back."""
        module.__spec__ = self._spec
        module.__loader__ = self._spec.loader


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
