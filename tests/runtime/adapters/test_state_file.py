"""Adapters loaded while an engine ran are known to the next engine."""

import json
import logging
from pathlib import Path

import pytest
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
    expected = (
        RememberedAdapter("team/a", "/a", pinned=True),
        RememberedAdapter("b", "/elsewhere"),
    )
    assert AdapterStateFile(path).adapters == expected
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"version": 2, "adapters": []}', '{"version": 1}',
        '{"version": 1, "adapters": [1]}',
        '{"version": 1, "adapters": [{"name": "a", "path": 1, "pinned": false}]}',
        '{"version": 1, "adapters": [{"name": "a", "path": "b", "pinned": false, "x": 1}]}',
    ],
)  # fmt: skip
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


def test_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    state = AdapterStateFile(path)
    state.put(RememberedAdapter("a", "/a"))
    (tmp_path / "state.json.new").mkdir()
    with caplog.at_level(logging.ERROR):
        state.put(RememberedAdapter("b", "/b"))
    assert "cannot be written" in caplog.text
    assert [one["name"] for one in json.loads(path.read_text())["adapters"]] == ["a"]
