"""State files are on disk before they replace older ones."""

import errno
import os
import stat
from pathlib import Path

import pytest
from corun.runtime.whole_file import write_whole


def test_the_file_is_forced_to_disk_before_its_name_and_the_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "state.json", list[str]()
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    write_whole(path, b"new")
    assert events == ["sync state.json.new", "rename", f"sync {tmp_path.name}"]
    assert path.read_bytes() == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot_sync_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path, fsync = tmp_path / "state.json", os.fsync

    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    if code == errno.EINVAL:
        write_whole(path, b"new")
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            write_whole(path, b"new")
    assert path.read_bytes() == b"new"
