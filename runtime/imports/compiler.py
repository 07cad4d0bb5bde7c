"""Loads torch's compiler only where it is used: it takes half a second, and sympy and triton.

While transformers is imported it wants nothing of ``torch._dynamo`` but to have functions marked
that the compiler is to leave alone. The marks are kept until the compiler is loaded, which the
use of anything else of it does. As long as it is not, nothing is compiled and there is nothing to
leave alone.

Imports of parts of it by other threads go on while one thread loads it, as they would without
this. A thread that uses it meanwhile waits; if the loading thread waits for that one, which
importlib cannot see, the use fails after a while.
"""

import functools
import importlib.abc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .amend import restore_loader, wrap_loader

COMPILER = "torch._dynamo"
# What transformers imports of it is a class that stands on torch alone.
_ALONE = ("_trace_wrapped_higher_order_op",)

_LOCK = threading.RLock()
_LOAD_TIMEOUT_S = 60.0


def defer_compiler() -> None:
    """Let a later import of the compiler in this process wait until the compiler is used."""
    if COMPILER not in sys.modules:
        wrap_loader(COMPILER, _DeferringLoader)
        sys.meta_path.insert(0, _PartFinder())


class _DeferringLoader(importlib.abc.Loader):
    """Stands for the loader of a module until something of the module is used."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader
        self._marks: list[tuple[str, Any]] = []  # names of the compiler's functions, what they got

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``Loader``."""
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See ``Loader``: not yet."""

    def load(self, module: ModuleType) -> None:
        """Run the module's code and give it the marks."""
        restore_loader(module, self._loader)
        try:
            self._loader.exec_module(module)
        except BaseException:
            restore_loader(module, self)
            raise
        module.__class__ = ModuleType
        for name, function in self._marks:
            getattr(module, name)(function)

    def stand_in(self, module: ModuleType, name: str) -> Callable[..., Any] | None:
        """Return what does for the function ``name`` as long as the module is not loaded."""
        if name in ("allow_in_graph", "assume_constant_result"):  # both return what they get
            return functools.partial(self._mark, module, name)
        return functools.partial(_disable, module) if name == "disable" else None

    def _mark(self, module: ModuleType, name: str, function: Any) -> Any:
        if not inspect.isfunction(function):  # the compiler may refuse it, or return another one
            return getattr(_load_compiler(module), name)(function)
        self._marks.append((name, function))
        return function


class _PartFinder(importlib.abc.MetaPathFinder):
    """Has the deferred package loaded before any part of it, as it would have been."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``MetaPathFinder``."""
        package, _, name = fullname.rpartition(".")
        if package != COMPILER or name in _ALONE:
            return None
        if not _LOCK.acquire(blocking=False):  # its thread may come to need this very part
            return None
        try:
            _load_compiler(sys.modules[COMPILER])
        finally:
            _LOCK.release()
        module = sys.modules.get(fullname)
        return None if module is None else ModuleSpec(fullname, _LoadedLoader(module))


class _LoadedLoader(importlib.abc.Loader):
    """Gives a module that has been loaded meanwhile, unchanged."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See ``Loader``."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """See ``Loader``."""
        module.__spec__ = self._spec


class _DeferredModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # Importing looks at these, whatever becomes of the module.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _locked():  # one thread loads it and sees what is there so far, others wait
            loader = _loader_of(self)
            found = None if loader is None else loader.stand_in(self, name)
            if found is not None:
                return found
            _load_compiler(self)
        return ModuleType.__getattribute__(self, name)


def _disable(module: ModuleType, fn: Any = None, *args: Any, **options: Any) -> Any:
    """The compiler's ``disable``: a function that is disabled once the compiler is loaded."""
    if fn is None:
        return lambda function: _disable(module, function, *args, **options)
    if not inspect.isfunction(fn):
        return _load_compiler(module).disable(fn, *args, **options)
    disabled: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*call_args: Any, **call_options: Any) -> Any:
        nonlocal disabled
        if isinstance(module, _DeferredModule):
            return fn(*call_args, **call_options)
        if disabled is None:
            disabled = _load_compiler(module).disable(fn, *args, **options)
        return disabled(*call_args, **call_options)

    # By these the compiler knows a disabled function, should it be asked to compile it after all.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_orig_callable = fn  # type: ignore[attr-defined]
    call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
    return call


def _load_compiler(module: ModuleType) -> Any:
    """Return the compiler, loaded or, if this thread is at that, as far as it is."""
    with _locked():
        loader = _loader_of(module)
        if loader is not None:
            loader.load(module)
    return module


def _loader_of(module: ModuleType) -> _DeferringLoader | None:
    """What would load it, if nobody has begun to."""
    assert module.__spec__ is not None
    loader = module.__spec__.loader
    return loader if isinstance(loader, _DeferringLoader) else None


@contextmanager
def _locked() -> Iterator[None]:
    if not _LOCK.acquire(timeout=_LOAD_TIMEOUT_S):
        raise ImportError(
            f"{COMPILER} has been loading for {_LOAD_TIMEOUT_S:.0f} s in another thread"
        )
    try:
        yield
    finally:
        _LOCK.release()
