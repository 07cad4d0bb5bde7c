"""Compiled kernels are cached only where no other user can write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from corun.shm.kept_code import shared_with

# Of the process that is asked; the directories are made by the test.
SCRIPT = """
from pathlib import Path
from corun.shm import atomics
from corun.shm.kept_code import why_code_is_not_kept
print(atomics.monotonic_ns() > 0, why_code_is_not_kept())
"""


def asked(cache: Path) -> str:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_directory_of_ones_own_is_used(tmp_path: Path) -> None:
    assert asked(tmp_path / "kernels") == "True None"
    assert list((tmp_path / "kernels").rglob("*.nbi"))


def test_a_full_disk_does_not_stop_kernels(tmp_path: Path) -> None:
    """A limit of the size of files, whose error differs from that of a full disk."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", limit + SCRIPT], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    directory, _, reason = done.stdout.strip().removeprefix("True ").partition(": ")
    assert Path(directory).is_relative_to(tmp_path) and reason == "File too large"
    (warning,) = done.stderr.splitlines()
    assert "not kept" in warning and "NUMBA_CACHE_DIR" in warning and reason in warning


def test_a_directory_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    cache = tmp_path / "kernels"
    cache.mkdir()
    cache.chmod(0o777)
    assert asked(cache) == f"True other users can write to {cache}"
    assert not list(cache.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_directory_that_others_can_write_is_shared(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert shared_with(tmp_path) == tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
def test_a_directory_of_another_user_is_shared(tmp_path: Path) -> None:
    os.chown(tmp_path, 4242, 4242)
    assert shared_with(tmp_path) == tmp_path


def test_what_others_could_put_in_its_place(tmp_path: Path) -> None:
    open_one, closed = tmp_path / "open", tmp_path / "open" / "closed"
    closed.mkdir(parents=True)
    assert shared_with(closed) is None
    assert shared_with(closed / "not" / "yet") is None
    open_one.chmod(0o777)
    assert shared_with(closed) == open_one
    assert shared_with(open_one / "not" / "yet") == open_one
    open_one.chmod(0o1777)  # as the temporary directory is
    assert shared_with(closed) is None
    assert shared_with(open_one / "not" / "yet") == open_one
    closed.chmod(0o775)
    os.chown(closed, -1, 4242) if os.geteuid() == 0 else None
    assert shared_with(closed) in ({closed} if os.geteuid() == 0 else {closed, None})
