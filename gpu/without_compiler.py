"""Starts without the parts of torch, scipy and accelerate that an engine does not use.

transformers imports torch's compiler, its distributed tensors, scipy's optimisers and accelerate for
decorators, training and several processes: a third of the start time. Code that uses them directly
still gets them.
"""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..runtime.kept_records import read_record, write_record

_COMPILER = "torch._dynamo"
_MODEL_LISTS = "transformers.utils.import_utils"
# The submodules that transformers imports. They do not need the package.
_INDEPENDENT = frozenset({"torch._dynamo._trace_wrapped_higher_order_op"})

# What models export, by the packages that it needs and by module.
_Exports = dict[frozenset[str], dict[str, set[str]]]


@contextmanager
def without_compiler(kept: Path | None = None, left_out: Sequence[str] = ("scipy",)) -> Iterator[None]:
    """Allow importing transformers and building a model as if torch had no compiler.

    For a process that compiles nothing: functions defined inside are not marked for exclusion from
    torch.compile, and transformers permanently assumes one device. Has no effect if transformers is
    already imported. ``kept``: the folder with results of earlier starts; None = there is none.
    ``left_out``: packages, optional for transformers, that it does not see.
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
        with _models_listed_once(kept), _left_out(left_out):
            yield
    finally:
        torch.distributed.is_available = is_distributed_available
        sys.meta_path.remove(finder)
        placeholder.restore()


@contextmanager
def _left_out(packages: Sequence[str]) -> Iterator[None]:
    """Let transformers see none of the packages. Others can import them."""
    from transformers import utils

    asked = {name: getattr(utils, name) for name in (f"is_{package}_available" for package in packages)}
    vars(utils).update(dict.fromkeys(asked, lambda: False))
    try:
        yield
    finally:
        vars(utils).update(asked)


@contextmanager
def _models_listed_once(kept: Path | None) -> Iterator[None]:
    """Let transformers and transformers.models use one list of what models export.

    To make it, each reads the sources of all models: half a second. The list of an earlier start is
    used while no file of them has been added, removed or replaced.
    """
    finder = _ModelListsFinder(kept)
    sys.meta_path.insert(0, finder)
    try:
        from transformers.utils import import_utils
    finally:
        sys.meta_path.remove(finder)
    try:
        yield
    finally:
        import_utils.define_import_structure = finder.define


class _ModelListsFinder(MetaPathFinder):
    """Replaces transformers' function that lists what models export, while it is imported."""

    def __init__(self, kept: Path | None) -> None:
        self.define: Callable[..., _Exports]  # transformers' own
        self._kept = kept
        self._listed: _Exports | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module with the function, or None."""
        spec = PathFinder.find_spec(name, path) if name == _MODEL_LISTS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._replace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _replace(self, module: Any) -> None:
        self.define = module.define_import_structure
        models = Path(module.__file__).parents[1] / "models"

        def define_import_structure(module_path: Any, prefix: str | None = None) -> _Exports:
            if Path(module_path) not in (models, models / "__init__.py"):
                return self.define(module_path, prefix)
            if self._listed is None:
                self._listed = self._list(models)
            before = "" if prefix is None else f"{prefix}."
            return {
                needed: {f"{before}{name}": exported for name, exported in modules.items()}
                for needed, modules in self._listed.items()
            }

        module.define_import_structure = define_import_structure

    def _list(self, models: Path) -> _Exports:
        path = None if self._kept is None else self._kept / "choices" / f"{_stamp_of(models)}.json"
        record = None if path is None else read_record(path, list[tuple[list[str], dict[str, list[str]]]])
        if record:
            return {
                frozenset(needed): {name: set(exported) for name, exported in modules.items()}
                for needed, modules in record
            }
        listed = self.define(models, None)
        if path is not None:
            write_record(path, [*listed.items()], "the next start lists transformers' models again")
        return listed


def _stamp_of(models: Path) -> str:
    """A digest that changes with each file that is added to the folder, or to one inside."""
    version = str(getattr(sys.modules["transformers"], "__version__", ""))
    with os.scandir(models) as found:
        folders = sorted((one.name, one.stat().st_mtime_ns) for one in found if one.is_dir())
    facts = version, str(models), models.stat().st_mtime_ns, folders
    return hashlib.sha256(repr(facts).encode()).hexdigest()


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
