"""Holds the rules of the house: who imports whom, how large things get, where output goes.

Everything is read from the source by its syntax tree; nothing is imported here but in fresh
processes.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_FOLDERS = ("runtime", "gpu", "cpu_workers", "shm", "profiles")
_MAX_FILE_LINES = 400
_MAX_FUNCTION_LINES = 60
# Kernels and their launchers may be long.
_KERNEL_FOLDERS = ("gpu/attention", "gpu/lora", "gpu/linear", "cpu_workers/kernels")

# Which parts of the product a folder may import; a dotted name allows everything below it. The
# longest matching folder decides.
_ALLOWED_IMPORTS = {
    # Of the profiles the pure part.
    "runtime": (
        "runtime",
        "cpu_workers.process_life",  # how a process begins and ends: standard library only
        "cpu_workers.kernels.simd.isa",  # names of levels and their environment
        "shm.arena_ranges",  # which ranges of anything are free: pure
        "profiles.busy",
        "profiles.curve",
        "profiles.derive",
        "profiles.find",
        "profiles.fit",
        "profiles.meter",
        "profiles.models",
        "profiles.picture",
        "profiles.profile",
        "profiles.report",
    ),
    # Composition: only this puts policy and mechanism together.
    "runtime/engine/assembly": ("runtime", "gpu", "shm", "cpu_workers", "profiles"),
    "runtime/cli/env.py": ("runtime", "cpu_workers.kernels"),
    "gpu": (
        "gpu",
        "shm",
        "cpu_workers.kernels",
        # The side of the CPU workers that the device talks to.
        "cpu_workers.pool",
        "cpu_workers.slices",
        # How a thread is pinned is the same on both sides.
        "cpu_workers.affinity",
        "runtime.plan",
        "runtime.sampling",
        "runtime.errors",
        "runtime.config",
        # Plain data of an adapter, on its way to the device.
        "runtime.adapters.digest",
        "runtime.adapters.target_map",
        "runtime.adapters.resolved",
        "runtime.adapters.tensor_names.EXPERTS_REASON",
    ),
    "cpu_workers": ("cpu_workers", "shm"),
    "shm": ("shm",),
    "profiles": ("profiles",),
    "profiles/measure": (
        "profiles",
        "gpu",
        "cpu_workers",
        "shm",
        "runtime.adapters.target_map",
    ),
}

# Policy decides and never computes: standard library and numpy only.
_POLICY = (
    "runtime.plan",
    "runtime.request",
    "runtime.sampling",
    "runtime.errors",
    "runtime.adapters.registry",
    "runtime.adapters.target_map",
    "runtime.engine.core",
    "runtime.engine.messages",
)
_POLICY_PACKAGES = (
    "runtime/scheduler",
    "runtime/coldstart",
    "runtime/machine",
    "runtime/memory",
    "runtime/config",
    "runtime/cli",
)
_HEAVY = ("torch", "transformers", "triton", "numba", "tokenizers", "peft")


@dataclass(frozen=True)
class Import:
    """One import statement of the product, resolved to what it names below ``corun``."""

    file: str
    line: int
    target: str  # "runtime.plan"; a name that is imported from a module is appended to it


@cache
def _product_files() -> tuple[Path, ...]:
    files = [path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py")]
    return (_ROOT / "__init__.py", *sorted(files))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _name(path: Path) -> str:
    return path.relative_to(_ROOT).as_posix()


def _imports(path: Path) -> Iterator[Import]:
    package = path.relative_to(_ROOT).parent.parts
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            assert node.level <= len(package) + 1, f"{_name(path)}:{node.lineno} leaves the package"
            base = package[: len(package) + 1 - node.level]
            prefix = [*base, *(node.module or "").split(".")]
            for alias in node.names:
                target = ".".join(part for part in [*prefix, alias.name] if part)
                yield Import(_name(path), node.lineno, target)


def _allowed(file: str) -> tuple[str, ...]:
    matching = [rule for rule in _ALLOWED_IMPORTS if file == rule or file.startswith(f"{rule}/")]
    return _ALLOWED_IMPORTS[max(matching, key=len)]


def _is_below(target: str, allowed: str) -> bool:
    return target == allowed or target.startswith(f"{allowed}.")


def test_folders_import_only_what_they_may() -> None:
    wrong = [
        f"{item.file}:{item.line} imports {item.target}"
        for path in _product_files()
        if path.parent != _ROOT
        for item in _imports(path)
        # The version is the root's only name that the inside needs.
        if item.target != "__version__"
        and not any(_is_below(item.target, allowed) for allowed in _allowed(item.file))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_what_runs_the_model_knows_that_passes_are_replayed() -> None:
    """Kernels are called by ``gpu.forward.launcher``, whoever notes it."""
    wrong = [
        f"{item.file}:{item.line} imports {item.target}"
        for path in _product_files()
        if not _name(path).startswith(("gpu/replay/", "gpu/execution/"))
        for item in _imports(path)
        if _is_below(item.target, "gpu.replay")
    ]
    assert not wrong, "\n".join(wrong)


def test_product_imports_itself_relatively() -> None:
    wrong = []
    for path in _product_files():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            wrong += [f"{_name(path)}:{node.lineno}" for n in names if _is_below(n, "corun")]
    assert not wrong, "\n".join(wrong)


def _policy_modules() -> list[str]:
    files = [path for folder in _POLICY_PACKAGES for path in (_ROOT / folder).glob("*.py")]
    modules = [".".join(path.relative_to(_ROOT).with_suffix("").parts) for path in files]
    return sorted([*_POLICY, *(name for name in modules if not name.endswith("__init__"))])


def test_policy_loads_no_heavy_library() -> None:
    """Import them one after the other in a fresh process; none may bring one along."""
    modules = ["corun", *(f"corun.{name}" for name in _policy_modules())]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {_HEAVY!r} if heavy in sys.modules]\n"
        "    if loaded:\n"
        "        sys.exit(f'{name} loads {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_grows_too_large() -> None:
    wrong = []
    for path in _product_files():
        name = _name(path)
        if name.startswith(_KERNEL_FOLDERS):
            continue
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > _MAX_FILE_LINES:
            wrong.append(f"{name} has {num_lines} lines, at most {_MAX_FILE_LINES}")
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > _MAX_FUNCTION_LINES:
                    wrong.append(f"{name}:{node.lineno} {node.name} has {num_lines} lines")
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{_name(path)}:{node.lineno}"
        for path in _product_files()
        if not _name(path).startswith("runtime/cli/")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def _own_names() -> set[str]:
    """Whatever the product itself defines or assigns."""
    names: set[str] = set()
    for node in (node for path in _product_files() for node in ast.walk(_tree(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


def _private_names_of_others(path: Path, own: set[str]) -> Iterator[str]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            yield ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else ""
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module == "numba.core":
                yield from (f"numba.core.{alias.name}" for alias in node.names)
            yield from (part for part in module.split("."))
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("numba.core"))


def test_private_names_of_others_are_listed() -> None:
    """With the reason, in CONTRIBUTING.md; but for those that Python itself documents."""
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Private names of other libraries")[2].partition("\n## ")[0]
    own = _own_names()
    wrong = {
        f"{_name(path)}: {name}"
        for path in _product_files()
        for name in _private_names_of_others(path, own)
        if name.startswith(("_", "numba.core"))
        and not name.startswith("__")
        and name not in {"_exit", "_fields", "_replace", "_typeshed"}
        and name not in section
    }
    assert section and not wrong, sorted(wrong)


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(settings["tool"]["setuptools"]["packages"])
    found = {"corun"} | {
        ".".join(["corun", *path.parent.relative_to(_ROOT).parts])
        for path in _product_files()
        if path.parent != _ROOT
    }
    assert listed == found


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_documents_have_no_open_ends(name: str) -> None:
    mark = "TODO" + "-LEAD"
    text = (_ROOT / name).read_text(encoding="utf-8")
    assert mark not in text, f"{text.count(mark)} places of {name} are not filled in"
