"""No private names of other libraries but those that are listed, with the reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

from support.product import ROOT, name_of, product_files, tree_of

# Private by their names, and documented by Python itself.
_DOCUMENTED = {"_exit", "_fields", "_replace", "_typeshed"}


def _own_names() -> set[str]:
    """Whatever the product itself defines or assigns."""
    names: set[str] = set()
    for node in (node for path in product_files() for node in ast.walk(tree_of(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


def _private_names_of_others(path: Path, own: set[str]) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
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
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Private names of other libraries")[2].partition("\n## ")[0]
    own = _own_names()
    wrong = {
        f"{name_of(path)}: {name}"
        for path in product_files()
        for name in _private_names_of_others(path, own)
        if name.startswith(("_", "numba.core"))
        and not name.startswith("__")
        and name not in _DOCUMENTED
        and name not in section
    }
    assert section and not wrong, sorted(wrong)
