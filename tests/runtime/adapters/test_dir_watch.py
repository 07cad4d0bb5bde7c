"""A watched directory that cannot be read for a while, as a whole or in part, or is replaced."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watchfiles
from corun.runtime.adapters import dir_watch, sources
from corun.runtime.adapters.dir_changes import DirChanges
from corun.runtime.adapters.dir_watch import LoraDir, LoraDirWatch
from support.peft_adapters import write_raw_safetensors

_SOON_S = 30.0  # ten times as long as it takes


def make_adapter(directory: Path, header: bytes = b"{}") -> None:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    write_raw_safetensors(directory / "adapter_model.safetensors", header)


class Watched:
    """A watch and its reports."""

    def __init__(self, directory: Path) -> None:
        lora_dir = LoraDir(directory)
        self._told = threading.Semaphore(0)
        self.watch = LoraDirWatch(lora_dir, lora_dir.look(), self._told.release)

    def next(self) -> DirChanges | None:
        """Return the next report; None: the number of unreadable entries has changed."""
        assert self._told.acquire(timeout=_SOON_S), "nothing is reported"
        return self.watch.take()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dir_watch, "_POLL_S", 0.1)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    make_adapter(tmp_path / "loras" / "one")
    make_adapter(tmp_path / "loras" / "team" / "two")
    watched = Watched(tmp_path / "loras")
    yield watched
    watched.watch.close()


@pytest.mark.parametrize("bad", ["loras", "loras/team", "loras/team/two"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_nothing_goes_while_it_cannot_be_read(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, code: int
) -> None:
    """Removals elsewhere are reported; removals there are reported afterwards."""
    refused = tmp_path / bad
    real = sources.discover

    def failing(lora_dir: Path, base_names: tuple[str, ...] = ()) -> sources.LoraDirEntries:
        entries = real(lora_dir, base_names)
        name = str(refused.relative_to(lora_dir)) if refused != lora_dir else ""
        for found in [*entries.adapters]:
            if name in ("", found) or found.startswith(f"{name}/"):
                del entries.adapters[found]
        entries.unreadable[name] = os.strerror(code)
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(dir_watch, "discover", failing)
        make_adapter(tmp_path / "loras" / "new")  # which triggers a scan
        assert watched.next() is None
        assert watched.watch.num_unreadable == 1
        if bad != "loras":
            shutil.rmtree(tmp_path / "loras" / "one")
            changes = watched.next()
            while changes is not None and not changes.removed:
                changes = watched.next()
            assert changes is not None and [*changes.removed] == ["one"]
        shutil.rmtree(tmp_path / "loras" / "team")
    removed: set[str] = set()
    while "team/two" not in removed:
        changes = watched.next()
        removed |= set(changes.removed) if changes is not None else set()
    assert watched.watch.num_unreadable == 0


def test_what_comes_just_before_the_system_watches_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = watchfiles.watch

    def late(*args: Any, **options: Any) -> Iterator[object]:
        make_adapter(tmp_path / "loras" / "new")
        yield from real(*args, **options)

    make_adapter(tmp_path / "loras" / "one")
    monkeypatch.setattr(watchfiles, "watch", late)
    watched = Watched(tmp_path / "loras")
    changes = watched.next()
    watched.watch.close()
    assert changes is not None and [*changes.changed] == ["new"]


def test_a_directory_that_is_replaced_by_another(watched: Watched, tmp_path: Path) -> None:
    make_adapter(tmp_path / "next" / "one", b"{ }")
    make_adapter(tmp_path / "next" / "three")
    (tmp_path / "loras").rename(tmp_path / "old")
    (tmp_path / "next").rename(tmp_path / "loras")
    changed: set[str] = set()
    removed: set[str] = set()
    while not (changed >= {"one", "three"} and removed == {"team/two"}):
        changes = watched.next()
        if changes is not None:
            changed |= set(changes.changed)
            removed |= set(changes.removed)
    make_adapter(tmp_path / "loras" / "four")  # the new one is watched
    while "four" not in changed:
        changes = watched.next()
        changed |= set(changes.changed) if changes is not None else set()


def test_no_line_of_another_library_for_changes(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make_adapter(tmp_path / "loras" / "new")
        assert watched.next()
    assert not [one for one in caplog.records if one.name.startswith("watchfiles")]
