"""One name for one thing, and no private names of other libraries, in product and tests."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.product import ROOT, files_of, name_of, nodes_of, product_files

# Private by their names, and documented by Python itself.
_DOCUMENTED = {"_current_frames", "_exit", "_fields", "_replace", "_typeshed"}
# Of other libraries, which tests alone use: ctypes' referenced object.
_OF_OTHERS_IN_TESTS = {"_obj", "_schema", "_global_mapping"}
# They patch a mistake into one method of a class and check that it is found.
_MISTAKES = {"tests/gpu/coexec/test_arrival_symbolic.py"}
# It checks that the accounts of parts agree with each other.
_CHECKS = {"tests/support/invariants.py"}
_PRIVATE = re.compile(r"_[a-z]\w*")  # a private constant is a time or a limit, which may be cut
_PATCHED = re.compile(r"corun\..*\._[a-z]\w*")
_PATCHES = {"setattr", "delattr", "getattr", "object", "patch"}


def test_no_public_class_has_the_name_of_another() -> None:
    places = defaultdict(list)
    for path in product_files():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{name_of(path)}:{node.lineno}")
    wrong = [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]
    assert not wrong, "\n".join(wrong)


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _own_names() -> set[str]:
    """All names that the product itself defines or assigns."""
    names: set[str] = set()
    for node in (node for path in product_files() for node in nodes_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


def _private_names_of_others(path: Path, own: set[str]) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Call) and _is_name(node.func, "getattr"):
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
    """They are in CONTRIBUTING.md with a reason, except those that Python itself documents."""
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


def _own_private_names(path: Path) -> set[str]:
    """Those that a test file defines itself."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if _is_name(node.value, "self") else "")
    return names


def _reached_names(path: Path) -> Iterator[tuple[int, str]]:
    """Private names of something else, and the line: used, imported, or replaced by a patch."""
    own = _own_private_names(path)
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            if not _is_name(node.value, "self", "cls") and node.attr not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            is_ours = (node.module or "").startswith(("corun", "support"))
            names = [alias.name for alias in node.names if is_ours]
            yield from ((node.lineno, name) for name in names if name.startswith("_"))
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in _patched_names(node) if name not in own)


def _patched_names(call: ast.Call) -> Iterator[str]:
    """What a call of ``setattr``, ``mock.patch`` and their like names by a string."""
    function = call.func
    if getattr(function, "attr", getattr(function, "id", "")) not in _PATCHES:
        return
    for argument in call.args[:2]:
        text = argument.value if isinstance(argument, ast.Constant) else None
        if isinstance(text, str) and (_PRIVATE.fullmatch(text) or _PATCHED.fullmatch(text)):
            yield text


def test_tests_reach_for_nothing_private() -> None:
    """Parts show the state that tests must see: results, ``is_idle``, counts.

    The parts of a whole engine are in ``EngineAssembly.parts``.
    """
    wrong = [
        f"{name_of(path)}:{line} {name}"
        for path in files_of("tests")
        if name_of(path) not in _MISTAKES | _CHECKS
        for line, name in _reached_names(path)
        if name not in _DOCUMENTED | _OF_OTHERS_IN_TESTS
    ]
    assert not wrong, "\n".join(wrong)
