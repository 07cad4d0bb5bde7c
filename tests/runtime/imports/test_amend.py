"""A module that is amended is imported as ever, by whoever, and changed once."""

import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from corun.runtime.imports.amend import amend_when_imported

NAME = "amended_example"


@pytest.fixture(autouse=True)
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that can be imported, and is forgotten after the test."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("value = 1\n")
    (tmp_path / NAME / "part.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def test_several_amend_one_module_which_tells_of_its_own_loader() -> None:
    seen: list[object] = []
    for name in (NAME, NAME, f"{NAME}.part"):
        amend_when_imported(name, lambda module: seen.append((module.__name__, module.value)))
    part = importlib.import_module(f"{NAME}.part")
    assert seen == [(NAME, 1), (NAME, 1), (f"{NAME}.part", 2)]
    for module in (part, sys.modules[NAME]):
        assert type(module.__loader__).__name__ == "SourceFileLoader"
        assert module.__spec__ is not None and module.__spec__.loader is module.__loader__


def test_what_is_amended_is_what_everybody_gets() -> None:
    def amend(module: ModuleType) -> None:
        module.value = 7  # type: ignore[attr-defined]

    amend_when_imported(NAME, amend)
    assert importlib.import_module(NAME).value == 7
    assert importlib.reload(sys.modules[NAME]).value == 1  # a reload is left alone


def test_one_that_has_been_imported_is_left_alone() -> None:
    module = importlib.import_module(NAME)
    amend_when_imported(NAME, lambda _: pytest.fail("it was amended"))
    assert importlib.import_module(NAME) is module


def test_an_import_that_fails_fails_as_ever() -> None:
    amend_when_imported("no_such_example", lambda _: pytest.fail("it was amended"))
    with pytest.raises(ModuleNotFoundError, match="no_such_example"):
        importlib.import_module("no_such_example")


def test_a_look_does_not_use_it_up() -> None:
    seen: list[str] = []
    amend_when_imported(NAME, lambda module: seen.append(module.__name__))
    assert importlib.util.find_spec(NAME) is not None
    importlib.import_module(NAME)
    assert seen == [NAME]


def test_two_threads_that_import_a_package_and_its_part_do_not_wait_for_each_other(
    tmp_path: Path,
) -> None:
    (tmp_path / NAME / "__init__.py").write_text(
        "import time\ntime.sleep(0.3)\nfrom . import part\n"
    )
    amend_when_imported(f"{NAME}.part", lambda module: time.sleep(0.1))
    threads = [
        threading.Thread(target=importlib.import_module, args=(name,), daemon=True)
        for name in (NAME, f"{NAME}.part")
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_an_import_of_another_thread_sees_all_finders() -> None:
    """A list that shrinks while somebody goes through it would hide the next finder from him."""
    amend_when_imported(NAME, lambda _: None)
    before = list(sys.meta_path)
    importlib.import_module(NAME)
    assert sys.meta_path == before
