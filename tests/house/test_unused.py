"""The product has nothing that only tests use; a benchmark counts as a user."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.product import (
    ROOT,
    files_of,
    imports_of,
    module_of,
    modules,
    name_of,
    nodes_of,
    product_files,
    tree_of,
)

_WORD = re.compile(r"\w+")
# Shown state that only tests read.
_SHOWN_TO_TESTS = {
    "CpuDevice.num_events",
    "DecodeGraphs.num_verified",
    "HostCache.num_used",
    "LoraTable.num_free_rows",
}


def _users() -> tuple[Path, ...]:
    return (*product_files(), *files_of("bench"))


def _bases_of_others(node: ast.ClassDef, own: set[str]) -> bool:
    """Whether it has a base outside the product, which calls its methods by name."""
    names = {ast.unparse(base).partition("[")[0] for base in node.bases}
    return bool(names - own - {"Protocol", "Generic"})


def _strings(path: Path) -> Iterator[str]:
    """All but docstrings, and other strings that stand alone."""
    alone = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and id(node) not in alone:
            yield node.value if isinstance(node.value, str) else ""


@cache
def _used_names() -> frozenset[str]:
    """Every name that product and benchmarks use, also in strings; a definition is no use."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = set(_WORD.findall(str(settings["project"]["scripts"])))
    for path in _users():
        for node in nodes_of(path):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.alias):
                names.update(node.name.split("."))
            elif isinstance(node, ast.keyword):
                names.add(node.arg or "")
        for text in _strings(path):
            names.update(_WORD.findall(text))
    return frozenset(names)


def _named_by_strings(path: Path) -> Iterator[str]:
    """Modules that are started or imported by name: ".serve", "corun.runtime.cli"."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for text in _strings(path):
        name = text.partition(":")[0]
        if name.startswith("."):
            yield f"{package}{name}".lstrip(".")
        else:
            yield name.removeprefix("corun.")


def test_every_module_is_used() -> None:
    """From the package itself, its processes and the benchmarks on, by imports and names."""
    left = ["", "runtime.cli.main"]
    left += [name for name in modules() if name.endswith(".__main__")]  # processes are modules
    for path in files_of("bench"):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("corun"):
                prefix = (node.module or "").removeprefix("corun").lstrip(".")
                left += [f"{prefix}.{alias.name}".lstrip(".") for alias in node.names]
        left += _named_by_strings(path)
    reached: set[str] = set()
    while left:
        module = module_of(left.pop())
        if module is None or module in reached:
            continue
        reached.add(module)
        path = modules()[module]
        left += [item.target for item in imports_of(path)]
        left += [name for name in _named_by_strings(path) if name in modules()]
    wrong = [
        name_of(path)
        for name, path in modules().items()
        if name not in reached and path.name != "__init__.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_public_function_and_class_is_used() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in product_files()
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and node.name not in _used_names()
    ]
    assert not wrong, "\n".join(wrong)


def test_every_public_method_is_used() -> None:
    """Or at least one of the same name."""
    classes = [
        (path, node) for path in product_files() for node in nodes_of(path) if isinstance(node, ast.ClassDef)
    ]
    own = {node.name for _, node in classes}
    wrong = [
        f"{name_of(path)}:{method.lineno} {node.name}.{method.name}"
        for path, node in classes
        if not _bases_of_others(node, own)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and not method.name.startswith("_")
        and method.name not in _used_names()
        and f"{node.name}.{method.name}" not in _SHOWN_TO_TESTS
    ]
    assert not wrong, "\n".join(wrong)
