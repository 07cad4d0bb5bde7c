"""Records in files: read as they were written, and computed again where they cannot be read."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from corun.runtime.kept_records import read_record, write_record


@dataclass(frozen=True)
class Answer:
    number: int
    names: tuple[str, ...] = ()


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "made" / "answer.json"
    assert read_record(path, Answer) is None
    write_record(path, Answer(3, ("a",)), "again")
    assert read_record(path, Answer) == Answer(3, ("a",))
    assert [each.name for each in path.parent.iterdir()] == ["answer.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"number": "three"}', b"\xff\x00"])
def test_something_else_is_no_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "answer.json"
    path.write_bytes(content)
    assert read_record(path, Answer) is None


def test_what_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    write_record(tmp_path / "file" / "answer.json", Answer(1), "it is asked again")
    assert "it is asked again" in caplog.text
