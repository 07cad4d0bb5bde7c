"""A deferred compiler is loaded when it is used, and marks what it was to mark before."""

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.imports import compiler

NAME = "compiler_example"
SOURCE = """
marked = []
num_loads = globals().get("num_loads", 0) + 1
def allow_in_graph(fn):
    marked.append(("allow", fn)); return fn
def assume_constant_result(fn):
    marked.append(("constant", fn)); return fn
def disable(fn=None, recursive=True, *, reason=None):
    return lambda *args: ("disabled", recursive, reason, fn(*args))
def compile(): return "compiled"
from . import part
assert part.found
"""
PART = """
import sys
import {name} as whole
found = not hasattr(whole, "no_such_name")  # while it is being loaded
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in of the compiler, deferred and imported."""
    directory = tmp_path / NAME
    directory.mkdir()
    (directory / "__init__.py").write_text(SOURCE)
    (directory / "part.py").write_text(PART.format(name=NAME))
    (directory / "alone.py").write_text("value = 3\n")
    (directory / "other.py").write_text("from . import part\nvalue = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiler, "COMPILER", NAME)
    monkeypatch.setattr(compiler, "_ALONE", ("alone",))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    compiler.defer_compiler()
    yield importlib.import_module(NAME)
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def is_loaded(package: Any) -> bool:
    return "num_loads" in vars(package)


def test_use_loads_it(package: Any) -> None:
    assert not is_loaded(package)
    assert package.compile() == "compiled"
    assert is_loaded(package)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name
    assert type(package) is type(sys)
    assert type(package.__loader__).__name__ == "SourceFileLoader"


def test_a_part_that_stands_alone_does_not_load_it(package: Any) -> None:
    assert importlib.import_module(f"{NAME}.alone").value == 3
    assert not is_loaded(package)


@pytest.mark.parametrize("name", ["part", "other"])  # imported by the package, and not
def test_it_is_loaded_before_its_parts(package: Any, name: str) -> None:
    part = importlib.import_module(f"{NAME}.{name}")
    assert is_loaded(package)
    assert part is getattr(package, name) is sys.modules[f"{NAME}.{name}"]
    assert type(part.__spec__.loader) is type(part.__loader__) is SourceFileLoader


def test_looking_at_it_is_not_use(package: Any) -> None:
    assert not hasattr(package, "__wrapped__")
    assert package.__file__.endswith("__init__.py")
    assert package.__path__
    assert not is_loaded(package)


def test_marks_are_kept_for_it(package: Any) -> None:
    def one() -> None: ...

    def two() -> None: ...

    assert package.allow_in_graph(one) is one
    assert package.assume_constant_result(two) is two
    assert not is_loaded(package)
    package.compile()
    assert package.marked == [("allow", one), ("constant", two)]
    package.allow_in_graph(two)
    assert package.marked[2:] == [("allow", two)]


def test_a_function_is_disabled_as_soon_as_there_is_a_compiler(package: Any) -> None:
    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    plain = package.disable(double)
    with_options = package.disable(None, False, reason="why")(double)
    assert plain.__name__ == "double" and plain.__doc__ == "Twice x."
    assert plain(2) == 4 and with_options(3) == 6
    assert not is_loaded(package)
    package.compile()
    assert plain(2) == ("disabled", True, None, 4)
    assert with_options(3) == ("disabled", False, "why", 6)


def test_what_is_no_function_is_disabled_by_the_compiler(package: Any) -> None:
    class Answer:
        def __call__(self) -> int:
            return 1

    assert package.disable(Answer())() == ("disabled", True, None, 1)
    assert is_loaded(package)


def test_a_load_that_fails_can_be_tried_again(package: Any) -> None:
    path = Path(package.__file__)
    path.write_text("raise ImportError('not today')\n" + " " * len(SOURCE))
    with pytest.raises(ImportError, match="not today"):
        package.compile()
    path.write_text(SOURCE)
    assert package.compile() == "compiled"


def test_one_of_several_threads_loads_it(package: Any) -> None:
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(package.compile())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == ["compiled"] * 8
    assert package.num_loads == 1


def test_parts_that_are_imported_meanwhile_do_not_stop_the_load(tmp_path: Path) -> None:
    """One thread loads the package and needs its part, another one imports that part."""
    directory = tmp_path / NAME
    directory.mkdir()
    (directory / "__init__.py").write_text(
        "import time\ntime.sleep(0.3)\nfrom . import part\nx = 1\n"
    )
    (directory / "part.py").write_text("import time\ntime.sleep(0.3)\n")
    code = _TWO_THREADS.format(name=NAME, directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_a_function_that_is_no_function_is_marked_at_once(package: Any) -> None:
    assert package.allow_in_graph(len) is len
    assert is_loaded(package)
    assert package.marked == [("allow", len)]


_TWO_THREADS = """
import importlib, sys, threading, time
sys.path.insert(0, {directory!r})
from corun.runtime.imports import compiler
compiler.COMPILER = {name!r}
compiler.defer_compiler()
package = importlib.import_module({name!r})
failed = []
def use():
    if package.x != 1:
        failed.append("x")
threads = [
    threading.Thread(target=use, daemon=True),
    threading.Thread(target=lambda: importlib.import_module({name!r} + ".part"), daemon=True),
]
for thread in threads:
    thread.start()
    time.sleep(0.1)
for thread in threads:
    thread.join(10)
assert not failed and not any(thread.is_alive() for thread in threads)
"""

_WITH_TORCH = """
import sys
from corun.runtime.imports.lean import lean_imports
lean_imports()
import torch
from transformers.models.llama.modeling_llama import LlamaForCausalLM
names = ("torch._dynamo.symbolic_convert", "torch.distributed.tensor", "sympy")
assert not [name for name in names if name in sys.modules]
calls = []
@torch.compiler.disable
def aside(x):
    calls.append(torch.compiler.is_compiling())
    return x + 1
@torch.compiler.allow_in_graph
def inside(x):
    return x * 2
def whole(x):
    return aside(inside(x))
@torch.compiler.disable
def early_one(x):
    return x + 1
x = torch.arange(3.0)
assert whole(x).tolist() == [1, 3, 5]
assert "torch._dynamo.symbolic_convert" not in sys.modules
compiled = torch.compile(whole, backend="eager")
assert compiled(x).tolist() == [1, 3, 5]
assert "torch._dynamo.symbolic_convert" in sys.modules
assert calls == [False, False]
graphs = []
def keep(graph, inputs):
    graphs.append(graph)
    return graph.forward
@torch.compiler.disable
def add_one(x):
    return x + 1
early, later = (torch.compile(function, backend=keep) for function in (early_one, add_one))
assert later(x).tolist() == early(x).tolist() == [1, 2, 3]
assert len(graphs) == 2  # whoever asks for a disabled function gets its original compiled
import torch._dynamo.trace_rules as rules
assert rules.is_callable_allowed(inside)
"""


def test_the_real_one() -> None:
    """transformers does without it, and it compiles when it is asked to."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _WITH_TORCH], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
