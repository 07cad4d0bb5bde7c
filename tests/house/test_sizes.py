"""Limits of sizes, places of output, and the contents of packages and documents."""

import ast
import re
import tomllib

import pytest
from support.product import ROOT, files_of, name_of, nodes_of, product_files

_MAX_FILE_LINES = 600
_MAX_FUNCTION_LINES = 60
# Kernels and their launchers may be long.
_KERNEL_FOLDERS = (
    *("gpu/attention", "gpu/fused/triton_kernels", "gpu/lora", "gpu/linear"),
    "cpu_workers/kernels",
)


def test_nothing_grows_too_large() -> None:
    wrong = []
    for path in product_files():
        name = name_of(path)
        if name.startswith(_KERNEL_FOLDERS):
            continue
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > _MAX_FILE_LINES:
            wrong.append(f"{name} has {num_lines} lines, at most {_MAX_FILE_LINES}")
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > _MAX_FUNCTION_LINES:
                    wrong.append(f"{name}:{node.lineno} {node.name} has {num_lines} lines")
    assert not wrong, "\n".join(wrong)


def test_the_formatter_lays_the_code_out() -> None:
    marks = ("# fmt: " + "skip", "# fmt: " + "off")
    files = [*product_files(), *files_of("tests"), *files_of("bench")]
    kept = [name_of(path) for path in files for mark in marks if mark in path.read_text(encoding="utf-8")]
    assert not kept, kept


def test_only_programs_of_the_command_line_print() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in product_files()
        if not name_of(path).startswith(("runtime/cli/", "gpu/check/"))
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(settings["tool"]["setuptools"]["packages"])
    found = {"corun"} | {
        ".".join(["corun", *path.parent.relative_to(ROOT).parts])
        for path in product_files()
        if path.parent != ROOT
    }
    assert listed == found


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_documents_have_no_open_ends(name: str) -> None:
    mark = "TODO" + "-LEAD"
    text = (ROOT / name).read_text(encoding="utf-8")
    assert mark not in text, f"{text.count(mark)} places of {name} are not filled in"


def test_contributing_names_files_that_there_are() -> None:
    """In its sections on paths of requests and adapters; names of files may be cut at the front."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ways = "".join(part for part in text.split("\n## ") if part.startswith("The path of"))
    files = [f"/{name_of(path)}" for path in product_files()]
    named = re.findall(r"`([\w/]+\.py)`", ways)
    wrong = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert named and not wrong, sorted(wrong)
