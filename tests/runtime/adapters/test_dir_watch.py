"""A watched directory that cannot be read for a while, as a whole or in part, or is replaced."""

import errno
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import watchfiles
from corun.runtime import file_calls
from corun.runtime.adapters import dir_watch, sources
from corun.runtime.adapters.dir_changes import DirChanges
from corun.runtime.adapters.dir_watch import LoraDir, LoraDirWatch
from corun.runtime.file_calls import FILES
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

    def failing(lora_dir: Path, *more: Any) -> sources.LoraDirEntries:
        entries = real(lora_dir, *more)
        name = str(refused.relative_to(lora_dir)) if refused != lora_dir else ""
        for found in [*entries.adapters]:
            if name in ("", found) or found.startswith(f"{name}/"):
                del entries.adapters[found]
                entries.examined.pop(found, None)
        entries.unreadable[name] = os.strerror(code)
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(dir_watch, "discover", failing)
        make_adapter(tmp_path / "loras" / "new")  # which triggers a scan
        assert watched.next() is None
        assert watched.watch.state.num_unreadable == 1
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
    assert watched.watch.state.num_unreadable == 0


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


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o666)


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # sparse


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


OTHERS = [os.mkfifo, os.mkdir, make_socket, make_huge, link_to_device]


def removed_names(watched: Watched, expected: set[str]) -> None:
    removed: set[str] = set()
    while removed != expected:
        changes = watched.next()
        removed |= set(changes.removed) if changes is not None else set()
        assert removed <= expected


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "x"])
def test_removals_are_reported_whichever_files_lie_beside(
    watched: Watched, tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    make_adapter(tmp_path / "loras" / "bad")
    (tmp_path / "loras" / "bad" / name).unlink(missing_ok=True)
    make(tmp_path / "loras" / "bad" / name)
    make(tmp_path / "loras" / "other")
    shutil.rmtree(tmp_path / "loras" / "one")
    removed_names(watched, {"one"})
    shutil.rmtree(tmp_path / "loras" / "team")
    removed_names(watched, {"team/two"})


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_socket])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_is_removed_when_its_files_are_none(
    watched: Watched, tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    """Something else in place of a file does not keep its adapter."""
    (tmp_path / "loras" / "one" / name).unlink()
    make(tmp_path / "loras" / "one" / name)
    removed_names(watched, {"one"})


class DeadMount:
    """Stands for a mount at one path: looking at it waits until it answers.

    Only that counts as waiting: elsewhere, a busy machine exceeds no deadline.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.answers = threading.Event()
        asked = threading.Event()
        real = {name: getattr(os, name) for name in ("stat", "scandir", "open")}

        def stuck(name: str) -> Callable[..., Any]:
            def call(at: Any, *args: Any, **options: Any) -> Any:
                if not isinstance(at, int) and Path(at).is_relative_to(path):
                    asked.set()
                    assert self.answers.wait(_SOON_S)
                return real[name](at, *args, **options)

            return call

        real_wait = Future[Any].exception

        def wait(future: Future[Any], timeout_s: float | None = None) -> BaseException | None:
            if timeout_s is not None:
                wait_for(lambda: future.done() or (asked.is_set() and not FILES.is_silent(str(path))))
            return real_wait(future, timeout_s)

        monkeypatch.setattr(Future, "exception", wait)
        for name in real:
            monkeypatch.setattr(os, name, stuck(name))


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_LOOK_TIMEOUT_S", 0.5)
    monkeypatch.setattr(FILES, "timeout_s", 0.5)
    monkeypatch.setattr(file_calls, "_SLICE_S", 0.05)


@pytest.mark.usefixtures("short_deadlines")
@pytest.mark.parametrize("dead", ["team", "team/two"])
def test_an_entry_that_does_not_answer_hides_no_removal_elsewhere(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    with monkeypatch.context() as patch:
        mount = DeadMount(patch, tmp_path / "loras" / dead)
        shutil.rmtree(tmp_path / "loras" / "one")
        removed_names(watched, {"one"})
        assert watched.watch.state.num_unreadable == 1
        num_threads = threading.active_count()
        make_adapter(tmp_path / "loras" / "three")
        changed: set[str] = set()
        while "three" not in changed:
            changes = watched.next()
            changed |= set(changes.changed) if changes is not None else set()
        assert threading.active_count() <= num_threads + 1  # one waits for the mount, not more
        mount.answers.set()
    while watched.watch.state.num_unreadable:
        assert watched.next() is None  # what is there stays
    shutil.rmtree(tmp_path / "loras" / "team")
    removed_names(watched, {"team/two"})


@pytest.mark.usefixtures("short_deadlines")
def test_a_directory_that_cannot_be_looked_at_is_said(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert watched.watch.state.unseen_s == 0
    monkeypatch.setattr(dir_watch, "_SILENT_S", 2.0)
    with monkeypatch.context() as patch:
        mount = DeadMount(patch, tmp_path / "loras")
        wait_for(lambda: "has not been looked at for 2 s" in caplog.text)
        assert watched.watch.state.unseen_s >= 2
        mount.answers.set()
    wait_for(lambda: "is looked at again" in caplog.text)
    assert watched.watch.state.unseen_s == 0
    shutil.rmtree(tmp_path / "loras" / "one")
    removed: set[str] = set()
    while "one" not in removed:
        changes = watched.next()
        removed |= set(changes.removed) if changes is not None else set()
    assert removed == {"one"}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
