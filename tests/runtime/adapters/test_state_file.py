"""Adapters loaded while an engine ran are known to the next engine."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest
from corun.runtime import file_calls
from corun.runtime.adapters.state_file import AdapterStateFile, RememberedAdapter
from corun.runtime.errors import ConfigError


def test_what_is_put_is_there_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state = AdapterStateFile(path)
    assert state.adapters == () and not path.exists()
    state.put(RememberedAdapter("team/a", "/a"))
    state.put(RememberedAdapter("b", "/b", pinned=True))
    state.put(RememberedAdapter("c", "/c"))
    state.remove("c")
    state.remove("nobody")
    state.pin("team/a", is_pinned=True)
    state.pin("nobody", is_pinned=True)
    state.put(RememberedAdapter("b", "/elsewhere"))
    state.close()
    assert state.is_written
    expected = (RememberedAdapter("team/a", "/a", pinned=True), RememberedAdapter("b", "/elsewhere"))
    assert AdapterStateFile(path).adapters == expected
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"version": 2, "adapters": []}',
        '{"version": 1}',
        '{"version": 1, "adapters": [1]}',
        '{"version": 1, "adapters": [{"name": "a", "path": 1, "pinned": false}]}',
        '{"version": 1, "adapters": [{"name": "a", "path": "b", "pinned": false, "x": 1}]}',
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--lora-state-file {path} is not a state file: "):
        AdapterStateFile(path)


def test_places_where_no_file_can_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the directory .* does not exist"):
        AdapterStateFile(tmp_path / "nowhere" / "state.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        AdapterStateFile(tmp_path)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    state = AdapterStateFile(path)
    state.put(RememberedAdapter("a", "/a"))
    state.close()
    (tmp_path / "state.json.new").mkdir()
    with caplog.at_level(logging.ERROR):
        state.put(RememberedAdapter("b", "/b"))
        state.close()
    assert "cannot be written" in caplog.text and state.is_written
    assert [one["name"] for one in json.loads(path.read_text())["adapters"]] == ["a"]


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b" \n"])
def test_what_a_power_cut_leaves_is_an_empty_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    state = AdapterStateFile(path)
    assert state.adapters == ()
    assert "is empty: adapters that were loaded over HTTP before are not served" in caplog.text
    state.put(RememberedAdapter("a", "/a"))
    state.close()
    assert [one.name for one in AdapterStateFile(path).adapters] == ["a"]


def test_a_slow_disk_delays_no_change_and_gets_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, goes_on, written = tmp_path / "state.json", threading.Event(), threading.Semaphore(0)
    fsync, num_syncs = os.fsync, 0

    def slow(descriptor: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        assert goes_on.wait(20.0)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    state = AdapterStateFile(path)
    state.on_written = written.release
    for number in range(10):
        state.put(RememberedAdapter(str(number), "/a"))
    assert not state.is_written and not path.exists()
    goes_on.set()
    while not state.is_written:
        assert written.acquire(timeout=20.0)
    assert [one.name for one in AdapterStateFile(path).adapters] == list("0123456789")
    assert num_syncs <= 4  # file and directory, of two states


def test_a_disk_that_does_not_answer_delays_no_operation_and_holds_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_calls, "_SLICE_S", 0.01)
    monkeypatch.setattr(file_calls.FILES, "timeout_s", 0.2)
    path, answers, written = tmp_path / "state.json", threading.Event(), threading.Semaphore(0)
    stuck = list[int]()

    def dead(descriptor: int) -> None:
        stuck.append(descriptor)
        assert answers.wait(20.0)

    monkeypatch.setattr(os, "fsync", dead)
    state = AdapterStateFile(path)
    state.on_written = written.release
    for number in range(100):
        state.put(RememberedAdapter(str(number), "/a"))
    while not state.is_written:  # the engine looks only when it is notified
        assert written.acquire(timeout=20.0)
    for number in range(100):
        state.remove(str(number))
        assert state.is_written
    state.close()
    assert len(stuck) == 1
    assert "cannot be written" in caplog.text and "does not answer" in caplog.text
    answers.set()
