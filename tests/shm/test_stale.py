"""Names of dead owners are removed; those of live processes and other users are not."""

import logging
import os
import signal
from pathlib import Path

import pytest
from corun.shm.stale import Process, own_name, remove_stale_names, start_ticks, this_process
from support.half_made_segment import half_made_segment
from support.processes import line_of, program


def test_an_owner_survives_the_removal_of_its_name() -> None:
    """By a process that sees other pids: in another container on the same /dev/shm."""
    with half_made_segment() as half_made:
        os.unlink(f"/dev/shm/{half_made.name}")
        creator = half_made.creator
        assert creator.stdin is not None
        creator.stdin.write("\n")
        creator.stdin.flush()
        assert line_of(creator) == "made"


def test_only_own_dead_names_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    uid, pid = os.getuid(), os.getpid()
    ticks = this_process().start_ticks
    dead = [f"corun-{uid}-{pid}-{ticks - 1}-0", f"corun-{uid}-4194999-5-17"]
    kept = [
        own_name(3).removeprefix("/"),
        f"corun-{uid + 1}-4194999-5-0",
        f"corun-{uid}-4194999-5",
        f"other-{uid}-4194999-5-0",
        f"corun-{uid}-x-5-0",
    ]
    for name in dead + kept:
        (tmp_path / name).touch()
    kept.append(f"corun-{uid}-4194999-5-1")
    (tmp_path / kept[-1]).mkdir()  # must not be removed in spite of its name
    assert sorted(remove_stale_names(tmp_path)) == sorted(dead)
    assert all(name in caplog.text for name in dead)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert remove_stale_names(tmp_path / "missing") == []


def test_a_process_is_told_from_a_later_one_with_its_id() -> None:
    with program("import sys; print('up', flush=True); sys.stdin.readline()") as child:
        line_of(child)
        ticks = start_ticks(child.pid)
        assert ticks is not None
        assert Process(child.pid, ticks).is_alive()
        assert not Process(child.pid, ticks + 1).is_alive()
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) is None  # dead, although not reaped
    assert not Process(child.pid, ticks).is_alive()


@pytest.mark.parametrize("name", ["a b", "x) S 1 (y"])
def test_odd_names_of_programs_do_not_confuse(name: str, tmp_path: Path) -> None:
    link = tmp_path / name
    link.symlink_to("/bin/sleep")
    pid = os.posix_spawn(str(link), [name, "60"], {})
    try:
        assert abs((start_ticks(pid) or 0) - this_process().start_ticks) < 10**7
        assert start_ticks(pid) is not None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
