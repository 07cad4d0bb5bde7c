"""Changes a module of somebody else right after its code has run, whenever it is imported."""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import cast


def amend_when_imported(name: str, amend: Callable[[ModuleType], None]) -> None:
    """Call ``amend`` with the module ``name`` as soon as it has been imported.

    Does nothing about one that has been. There may be several for one module.
    """
    wrap_loader(name, lambda loader: _AmendingLoader(loader, amend))


def wrap_loader(name: str, wrap: Callable[[importlib.abc.Loader], importlib.abc.Loader]) -> None:
    """Let the next import of ``name`` use what ``wrap`` makes of its loader."""
    sys.meta_path.insert(0, _Finder(name, wrap))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the finders after it do; a reload is left to them.

    It stays in its list: another thread's import that goes through it would miss the next one.
    And it imports nothing, not even the package: two threads would wait for each other.
    """

    def __init__(
        self, name: str, wrap: Callable[[importlib.abc.Loader], importlib.abc.Loader]
    ) -> None:
        self._name = name
        self._wrap = wrap

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``MetaPathFinder``."""
        if fullname != self._name or target is not None:
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)  # older finders have none
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = self._wrap(spec.loader)
                return cast(ModuleSpec, spec)
        return None


class _AmendingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, amend: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._amend = amend

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``Loader``."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See ``Loader``."""
        restore_loader(module, self._loader)
        self._loader.exec_module(module)
        self._amend(module)


def restore_loader(module: ModuleType, loader: importlib.abc.Loader) -> None:
    """Let the module tell of ``loader``, as if it had not been wrapped."""
    assert module.__spec__ is not None
    module.__loader__ = module.__spec__.loader = loader
