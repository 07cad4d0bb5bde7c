"""The product's source, read by its syntax tree; nothing of it is imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("runtime", "gpu", "cpu_workers", "shm", "profiles")


@dataclass(frozen=True)
class Import:
    """One import statement of the product, resolved to what it names below ``corun``."""

    file: str
    line: int
    target: str  # "runtime.plan"; a name that is imported from a module is appended to it


@cache
def product_files() -> tuple[Path, ...]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return (ROOT / "__init__.py", *sorted(files))


@cache
def files_of(folder: str) -> tuple[Path, ...]:
    return tuple(sorted((ROOT / folder).rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of its tree, which takes long to walk."""
    return tuple(ast.walk(tree_of(path)))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def modules() -> dict[str, Path]:
    """The product's modules by name below ``corun``; a package's own is "runtime.scheduler"."""
    found = {}
    for path in product_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path) -> Iterator[Import]:
    """Of the product by itself, wherever in the file they stand."""
    package = path.relative_to(ROOT).parent.parts
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            place = f"{name_of(path)}:{node.lineno}"
            assert node.level <= len(package) + 1, f"{place} leaves the package"
            base = package[: len(package) + 1 - node.level]
            prefix = [*base, *(node.module or "").split(".")]
            for alias in node.names:
                target = ".".join(part for part in [*prefix, alias.name] if part)
                yield Import(name_of(path), node.lineno, target)


def module_of(target: str) -> str | None:
    """The module that an import of ``target`` loads; None if it is none of the product's."""
    if target in modules():
        return target
    outer = target.rpartition(".")[0]
    return outer if outer in modules() else None


def is_below(target: str, allowed: str) -> bool:
    return target == allowed or target.startswith(f"{allowed}.")
