"""Segments: the checks of create and attach, and that nothing is left after any kill."""

import contextlib
import errno
import logging
import mmap
import os
import resource
import signal
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from corun.shm.backing import Backing, available_memory_bytes
from corun.shm.errors import FormatError, ShmError, SpaceError
from corun.shm.segment import HEADER_BYTES, Segment
from support.processes import finish, line_of, program
from support.residue import open_descriptors

_BACKINGS: tuple[Backing, ...] = ("posix", "memfd")


def _names() -> set[str]:
    """Names of this test's own shared memory; other programs may have theirs."""
    return {name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name}


@pytest.mark.parametrize("backing", _BACKINGS)
def test_payload_is_shared_aligned_and_zero(backing: Backing) -> None:
    with (
        Segment.create(10_000, kind="test", backing=backing) as first,
        Segment.attach(first.fd, kind="test") as second,
    ):
        assert first.num_bytes == second.num_bytes == len(second.buffer) == 10_000
        assert first.address % mmap.PAGESIZE == second.address % mmap.PAGESIZE == 0
        assert not any(first.buffer)
        first.view(np.uint32, 8, 2)[:] = 7, 9
        assert list(second.view(np.uint32, 8, 2)) == [7, 9]
        assert first.view(np.uint8, 0, 1).ctypes.data == first.address
        assert second.backing == backing


@pytest.mark.parametrize("backing", _BACKINGS)
def test_only_this_user_may_open_it_and_it_has_no_name(backing: Backing) -> None:
    with Segment.create(1, kind="test", backing=backing) as segment:
        status = os.fstat(segment.fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        assert status.st_nlink == 0
        assert not os.get_inheritable(segment.fd)
        assert _names() == set()


def test_memory_is_allocated_at_once() -> None:
    with Segment.create(1 << 20, kind="test") as segment:
        assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20


def test_more_than_there_is_names_needed_and_available_bytes() -> None:
    for backing in ("auto", *_BACKINGS):
        with pytest.raises(SpaceError) as caught:
            Segment.create(1 << 50, kind="arena", backing=backing)
        error = caught.value
        assert error.needed_bytes == HEADER_BYTES + (1 << 50)
        assert 0 < error.available_bytes < error.needed_bytes
        assert "arena" in str(error)
        assert str(error.needed_bytes) in str(error)
        assert str(error.available_bytes) in str(error)


def test_a_full_file_system_names_needed_and_available_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(SpaceError, match="--shm-size"):
        Segment.create(4096, kind="test", backing="posix")


def test_a_limit_of_the_size_of_files_is_named() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        for backing in _BACKINGS:
            with pytest.raises(ShmError, match=r"for arena: .*\(ulimit -f\)"):
                Segment.create(1 << 20, kind="arena", backing=backing)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_no_size_and_unknown_backings_are_refused() -> None:
    with pytest.raises(ShmError, match="at least one byte"):
        Segment.create(0, kind="test")
    with pytest.raises(ShmError, match="auto, posix or memfd"):
        Segment.create(1, kind="test", backing="file")  # type: ignore[arg-type]


def test_auto_takes_posix_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Segment.create(1, kind="test") as segment:
        assert segment.backing == "posix"
    assert "posix" in caplog.text


def set_free_in_shm(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    status = SimpleNamespace(f_bavail=num_bytes, f_frsize=1)
    monkeypatch.setattr("os.statvfs", lambda path: status)


def test_auto_takes_memfd_where_dev_shm_is_small(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_free_in_shm(monkeypatch, 8192)
    with caplog.at_level(logging.INFO), Segment.create(8192, kind="test") as segment:
        assert segment.backing == "memfd"
    assert "has 8192 bytes left" in caplog.text
    with pytest.raises(SpaceError):
        Segment.create(8192, kind="test", backing="posix")


def test_auto_takes_memfd_without_posix_ipc(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "posix_ipc", None)
    with caplog.at_level(logging.INFO), Segment.create(1, kind="test") as segment:
        assert segment.backing == "memfd"
    assert "cannot be imported" in caplog.text
    with pytest.raises(ShmError, match="posix_ipc"):
        Segment.create(1, kind="test", backing="posix")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 4 << 20),
        ({"memory.max": "max", "memory.current": "5"}, 4 << 20),
        ({"memory.max": "3000", "memory.current": "2000"}, 1000),
        (
            {"memory.max": "3000", "memory.current": "2000", "memory.stat": "anon 1\ninactive_file 500\n"},
            1500,
        ),
        ({"memory.max": "1000", "memory.current": "2000"}, 0),
        ({"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "2500"}, 500),
    ],
)
def test_available_memory_respects_a_container(tmp_path: Path, limits: dict[str, str], expected: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    4096 kB\n")
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory_bytes(tmp_path) == expected


def test_attach_refuses_what_is_no_such_segment(tmp_path: Path) -> None:
    with Segment.create(100, kind="test", backing="memfd") as segment:
        with pytest.raises(FormatError, match="holds segment test; rings was expected"):
            Segment.attach(segment.fd, kind="rings")
        os.pwrite(segment.fd, b"\x63", 8)
        with pytest.raises(FormatError, match="version 99"):
            Segment.attach(segment.fd, kind="test")
        os.pwrite(segment.fd, b"\x01", 8)
        os.pwrite(segment.fd, b"\x01\x00", 12)
        with pytest.raises(FormatError, match="pages of 1 bytes"):
            Segment.attach(segment.fd, kind="test")
        os.pwrite(segment.fd, HEADER_BYTES.to_bytes(4, "little"), 12)
        os.ftruncate(segment.fd, HEADER_BYTES + 50)
        with pytest.raises(FormatError, match="should have"):
            Segment.attach(segment.fd, kind="test")
        os.pwrite(segment.fd, b"nonsense", 0)
        with pytest.raises(FormatError, match="holds no segment"):
            Segment.attach(segment.fd, kind="test")
    empty = os.open(tmp_path / "empty", os.O_CREAT | os.O_RDWR)
    reading, writing = os.pipe()
    for fd, message in ((empty, "no segment"), (reading, "is not a file"), (999_999, "not open")):
        with pytest.raises(FormatError, match=message):
            Segment.attach(fd, kind="test")
    for fd in (empty, reading, writing):
        os.close(fd)


@pytest.mark.parametrize("backing", _BACKINGS)
def test_sparse_memory_is_taken_and_given_back(backing: Backing) -> None:
    with Segment.create(64 << 20, kind="test", backing=backing, is_sparse=True) as segment:
        held = os.fstat(segment.fd).st_blocks
        assert held * 512 < 1 << 20
        segment.allocate(1 << 20, 4 << 20)
        assert os.fstat(segment.fd).st_blocks * 512 >= 4 << 20
        values = segment.view(np.uint8, 1 << 20, 4 << 20)
        values[:] = 5
        with Segment.attach(segment.fd, kind="test") as other:
            assert other.is_sparse
            assert other.view(np.uint8, 1 << 20, 1)[0] == 5
        segment.give_back((1 << 20) + 100, (4 << 20) - 200)
        assert os.fstat(segment.fd).st_blocks * 512 < 1 << 20
        assert values[:100].all() and values[-100:].all()
        assert not values[100:-100].any()
        segment.allocate(1 << 20, 4 << 20)  # keeps what is there
        assert values[0] == 5
        del values


def test_sparse_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create(64 << 20, kind="arena", is_sparse=True) as segment:
        set_free_in_shm(monkeypatch, 1 << 20)
        with pytest.raises(SpaceError, match="arena needs 2097152 bytes"):
            segment.allocate(0, 2 << 20)
        segment.allocate(0, 1 << 20)


def test_close_names_the_segment_whose_views_are_alive() -> None:
    segment = Segment.create(4096, kind="rings")
    for make in (
        lambda: segment.view(np.uint8, 0, 10),
        lambda: segment.buffer[10:20],
        lambda: torch.frombuffer(segment.buffer, dtype=torch.bfloat16),
    ):
        view = make()
        with pytest.raises(ShmError, match="segment rings cannot be closed"):
            segment.close()
        view[0] = 3  # still mapped
        assert segment.address > 0
        del view
    fd = segment.fd
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ShmError, match="closed"):
        _ = segment.address


def test_an_error_on_its_way_out_is_not_hidden_by_views() -> None:
    def fail() -> None:
        with Segment.create(4096, kind="test") as segment:
            view = segment.view(np.uint8, 0, 1)
            raise ValueError(str(view[0]))

    before = open_descriptors()
    with pytest.raises(ValueError, match="0"):
        fail()
    assert not open_descriptors() - before


def test_refused_segments_leave_no_descriptor() -> None:
    before = open_descriptors()
    with Segment.create(4096, kind="test") as segment:
        for _ in range(5):
            with pytest.raises(FormatError):
                Segment.attach(segment.fd, kind="other")
            with pytest.raises(SpaceError):
                Segment.create(1 << 50, kind="test")
    assert not open_descriptors() - before


_PEER = """
import sys, time
import numpy as np
from corun.shm.segment import Segment
segment = Segment.attach(int(sys.argv[1]), kind="test")
segment.view(np.int64, 0, 2)[:] = 40, 2
print("ready", flush=True)
sys.stdin.readline()
segment.close()
"""

_OWNER = """
import os, sys
from corun.shm.segment import Segment
segments = [Segment.create(4096, kind="test", backing=sys.argv[1]) for _ in range(3)]
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_peer_attaches_by_descriptor_and_may_die(is_killed: bool) -> None:
    with (
        Segment.create(4096, kind="test") as segment,
        program(_PEER, segment.fd, pass_fds=[segment.fd]) as peer,
    ):
        assert line_of(peer) == "ready"
        assert int(segment.view(np.int64, 0, 2).sum()) == 42
        if is_killed:
            peer.kill()
            assert peer.wait(60) == -signal.SIGKILL
        else:
            finish(peer)
        assert int(segment.view(np.int64, 0, 2).sum()) == 42


@pytest.mark.parametrize("backing", _BACKINGS)
def test_nothing_is_left_of_a_killed_owner(backing: Backing) -> None:
    with program(_OWNER, backing) as owner:
        pid = line_of(owner)
        owner.kill()
        owner.wait(60)
    assert not [name for name in os.listdir("/dev/shm") if f"-{pid}-" in name]


def test_memory_lives_until_its_last_holder_is_gone() -> None:
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(program(_OWNER, "posix"))
        pid = line_of(owner)
        path = next(
            link
            for link in Path(f"/proc/{pid}/fd").iterdir()
            if os.readlink(link).startswith("/dev/shm/corun-")
        )
        fd = os.open(path, os.O_RDWR)
        stack.callback(os.close, fd)
        owner.kill()
        owner.wait(60)
        with Segment.attach(fd, kind="test") as segment:
            segment.view(np.uint8, 0, 4096)[:] = 1


def test_pages_hold_the_payload_and_nothing_of_others() -> None:
    with Segment.create(mmap.PAGESIZE + 1, kind="odd") as segment:
        assert len(segment.buffer) == mmap.PAGESIZE + 1
        assert len(segment.pages) == 2 * mmap.PAGESIZE
        segment.pages[mmap.PAGESIZE] = 7
        assert segment.buffer[mmap.PAGESIZE] == 7
        with Segment.attach(segment.fd, kind="odd") as other:
            assert other.num_bytes == mmap.PAGESIZE + 1
            assert other.pages[mmap.PAGESIZE] == 7
