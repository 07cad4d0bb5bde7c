"""Packed matrices are read from disk unchanged, or not at all."""

import multiprocessing
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from corun.gpu.linear import kept_weights
from corun.gpu.linear.kept_weights import KeptWeights, LateWeights, cached_answer

MATRICES: dict[str, dict[str, np.ndarray]] = {
    "a": {"int8": np.arange(6000, dtype=np.uint8).reshape(2, 30, 100)},
    "b.c": {"int4": np.full((1, 1, 7), 3, np.uint8), "zero points": np.zeros((1, 5), np.uint8)},
}
QUESTION = "q" * 64


def put(directory: Path, key: str = "key") -> Path:
    KeptWeights(directory, key).write(MATRICES)
    (path,) = directory.glob(f"{key}.weights")
    return path


def read(directory: Path, key: str = "key") -> dict[str, object]:
    kept = KeptWeights(directory, key)
    try:
        return {name: kept.read(name) for name in MATRICES}
    finally:
        kept.close()


def is_whole(found: dict[str, object]) -> bool:
    return all(
        isinstance(arrays := found[name], dict)
        and all(np.array_equal(arrays[key], array) for key, array in expected.items())
        for name, expected in MATRICES.items()
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == {"a": None, "b.c": None}
    put(tmp_path)
    assert is_whole(read(tmp_path))
    assert read(tmp_path, "another") == {"a": None, "b.c": None}


def test_arrays_lie_in_memory_of_their_own(tmp_path: Path) -> None:
    path = put(tmp_path)
    found = read(tmp_path)
    path.write_bytes(b"")
    assert is_whole(found)


@pytest.mark.parametrize("damage", ["a byte", "end", "index", "length", "nothing left", "no index"])
def test_a_damaged_file_is_noticed(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = put(tmp_path)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    if damage == "a byte":
        content[-3] ^= 1
    elif damage == "end":
        del content[-3:]
    elif damage == "index":
        content[8] = 0
    elif damage == "length":
        content[:8] = b"\xff" * 8
    elif damage == "nothing left":
        content.clear()
    else:
        content[8 : 8 + length] = b"[]".ljust(length)
    path.write_bytes(content)
    assert read(tmp_path)["b.c"] is None
    assert "is damaged and will be made again" in caplog.text
    assert is_whole(read(tmp_path)) is False
    put(tmp_path)
    assert is_whole(read(tmp_path))


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=put, args=(tmp_path,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(20)
        assert writer.exitcode == 0
    assert is_whole(read(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["key.weights"]


class Busy:
    """An engine that always has requests."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self) -> bool:
        self.asked.set()
        return True


def test_a_busy_engine_is_written_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer rests while requests run, and writes the rest at the end."""
    monkeypatch.setattr(kept_weights, "_REST", 1e9)
    busy, late = Busy(), LateWeights(KeptWeights(tmp_path, "key"), MATRICES)
    late.begin(busy)
    assert busy.asked.wait(20)
    assert not (tmp_path / "key.weights").exists()
    late.close()
    late.close()
    assert is_whole(read(tmp_path))


def test_what_takes_too_long_at_the_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_weights, "_CLOSE_S", 0.0)
    monkeypatch.setattr(kept_weights, "_REST", 1e9)
    busy, late = Busy(), LateWeights(KeptWeights(tmp_path, "key"), MATRICES)
    late.begin(busy)
    assert busy.asked.wait(20)
    late.close()
    for thread in threading.enumerate():
        if thread.name == "corun-late-weights":  # on a busy machine it outlasts the wait
            thread.join(20)
    assert "the engine ended before they were written" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    left, being_written = tmp_path / "tmpleft", tmp_path / "tmpnow"
    left.touch()
    being_written.touch()
    os.utime(left, (time.time() - 7200,) * 2)
    put(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.weights", "tmpnow"]


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.touch()
    KeptWeights(file / "below", "key").write(MATRICES)
    assert "not kept for the next start" in caplog.text
    assert cached_answer(file / "below", QUESTION, lambda: "a" * 64) == "a" * 64


def test_what_nobody_has_used_for_long_goes(tmp_path: Path) -> None:
    old, used = put(tmp_path, "old"), put(tmp_path, "used")
    long_ago_s = time.time() - 100 * 86400
    for path in (old, used):
        os.utime(path, (long_ago_s, long_ago_s))
    read(tmp_path, "used")
    put(tmp_path, "new")
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["new", "used"]


def test_the_least_recently_used_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = put(tmp_path, "first"), put(tmp_path, "second")
    os.utime(first, (time.time() - 60,) * 2)
    size = first.stat().st_size
    usage = SimpleNamespace(free=2 * size + 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    put(tmp_path, "third")
    assert second.exists() and not first.exists()
    usage.free = 0
    KeptWeights(tmp_path, "fourth").write({"large": {"int8": np.zeros(5 * size, np.uint8)}})
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["second", "third"]


def test_an_answer_is_found_once(tmp_path: Path) -> None:
    answers = iter(["a" * 64, "b" * 64])
    assert cached_answer(tmp_path, QUESTION, lambda: next(answers)) == "a" * 64
    assert cached_answer(tmp_path, QUESTION, lambda: next(answers)) == "a" * 64
    (note,) = tmp_path.iterdir()
    note.write_text("damaged")
    assert cached_answer(tmp_path, QUESTION, lambda: next(answers)) == "b" * 64
