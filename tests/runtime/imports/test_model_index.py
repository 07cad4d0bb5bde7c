"""What transformers finds among its models is read once, and again when a file has changed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.imports.model_index import KeptScan
from transformers.utils import import_utils

_FOUND = {"llama": {frozenset({"torch"}): {"modeling_llama": {"LlamaModel"}}}, "auto": {}}


class Scans:
    """A folder of models, a cache, and scans of the folder that are counted."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / "models"
        self.cache = directory / "cache" / "corun"
        self.source = directory / "scan.py"
        self.source.touch()
        self.count = 0
        for name in ("llama", "auto"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "llama" / "modeling_llama.py").write_text("one")

    def scan(self, path: str | Path) -> Any:
        """What ``KeptScan`` stands for."""
        self.count += 1
        return {**_FOUND, "of": str(path)}

    def found_by_a_process(self) -> Any:
        """What two imports in a new process find; they must find the same."""
        kept = KeptScan(self.scan, self.source, self.folder, self.cache)
        first = kept(str(self.folder))
        first.pop("auto")  # as callers do what they like with it
        second = kept(self.folder / "__init__.py")
        assert {**first, "auto": {}, "of": ""} == {**second, "of": ""}
        return second


@pytest.fixture
def scans(tmp_path: Path) -> Scans:
    return Scans(tmp_path)


def test_files_are_read_by_the_first_process_alone(scans: Scans) -> None:
    found = scans.found_by_a_process()
    assert scans.found_by_a_process() == found
    assert scans.count == 1
    assert [file.name.startswith("models-") for file in scans.cache.iterdir()] == [True]


def test_other_folders_are_not_kept(scans: Scans) -> None:
    kept = KeptScan(scans.scan, scans.source, scans.folder, scans.cache)
    for _ in range(2):
        assert kept(scans.folder / "llama" / "__init__.py")["of"].endswith("llama/__init__.py")
    assert scans.count == 2
    assert not scans.cache.exists()


def _add(scans: Scans) -> None:
    (scans.folder / "auto" / "new.py").touch()


def _remove(scans: Scans) -> None:
    (scans.folder / "auto").rmdir()


def _rewrite(scans: Scans) -> None:
    (scans.folder / "llama" / "modeling_llama.py").write_text("more")


def _touch(scans: Scans) -> None:
    os.utime(scans.folder / "llama" / "modeling_llama.py", (1, 1))


def _change_scan(scans: Scans) -> None:
    scans.source.write_text("other")


def _cut(scans: Scans) -> None:
    (file,) = scans.cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("change", [_add, _remove, _rewrite, _touch, _change_scan, _cut])
def test_files_are_read_again_after_a_change(scans: Scans, change: Callable[[Scans], None]) -> None:
    scans.found_by_a_process()
    change(scans)
    scans.found_by_a_process()
    assert scans.count == 2
    scans.found_by_a_process()
    assert scans.count == 2


def test_without_a_cache_files_are_read_as_ever(scans: Scans) -> None:
    scans.cache.parent.write_text("a file where the cache's folder would be")
    for _ in range(2):
        scans.found_by_a_process()
    assert scans.count == 2  # one a process, all the same


def test_what_this_version_of_transformers_finds_can_be_kept(tmp_path: Path) -> None:
    assert import_utils.__file__ is not None
    source = Path(import_utils.__file__)
    folder = source.parents[1] / "models"
    scan = import_utils.create_import_structure_from_path
    found = KeptScan(scan, source, folder, tmp_path)(str(folder))

    def forbidden(path: str | Path) -> Any:
        raise AssertionError(path)

    assert found["llama"]
    assert KeptScan(forbidden, source, folder, tmp_path)(str(folder)) == found


_IMPORT = """
from corun.runtime.imports.model_index import keep_model_index
keep_model_index()
import transformers.utils.import_utils as utils
print(type(utils.create_import_structure_from_path).__name__, type(utils.__loader__).__name__)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("def create_import_structure_from_path(module_path): ...", "KeptScan SourceFileLoader"),
        ("create_import_structure_from_path = 1", "int SourceFileLoader"),
    ],
)
def test_an_import_is_left_as_it_was_but_for_the_function(
    tmp_path: Path, code: str, printed: str
) -> None:
    package = tmp_path / "transformers" / "utils"
    package.mkdir(parents=True)
    (package / "import_utils.py").write_text(code)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == printed
