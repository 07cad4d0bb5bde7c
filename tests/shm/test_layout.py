"""The layout: fields do not overlap, flags have their own lines, and the page shows them all."""

import ctypes
import itertools
from pathlib import Path

import pytest
from corun.shm import layout
from corun.shm.job import Job
from corun.shm.layout import Field

_TABLES = {name: getattr(layout, name) for name in dir(layout) if name.endswith("_FIELDS")}
_SIZES = {"int32": ctypes.sizeof(ctypes.c_int32), "int64": ctypes.sizeof(ctypes.c_int64)}


def _markdown(table: tuple[Field, ...]) -> str:
    rows = [
        f"| {field.offset} | `{field.name}` | {field.kind} | {field.writer} | {field.reader} "
        f"| {field.meaning} |"
        for field in table
    ]
    head = ["| byte | field | type | written by | read by | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def test_the_page_of_fields_has_exactly_these_tables(repository: Path) -> None:
    page = (repository / "shm/FIELDS.md").read_text()
    tables = [
        "\n".join(lines)
        for is_table, lines in itertools.groupby(page.splitlines(), lambda line: line.startswith("|"))
        if is_table
    ]
    expected = [
        _markdown(_TABLES[name])
        for name in ("CONTROL_FIELDS", "TEAM_FIELDS", "WORKER_FIELDS", "JOB_FIELDS", "ROWS_FIELDS")
    ]
    assert tables == expected
    assert len(_TABLES) == len(expected)
    assert f"one job of {layout.JOB_BYTES} bytes" in page


@pytest.mark.parametrize("name", sorted(_TABLES))
def test_fields_are_aligned_and_do_not_overlap(name: str) -> None:
    table = _TABLES[name]
    assert all(field.offset % _SIZES[field.kind] == 0 for field in table)
    ends = [field.offset + _SIZES[field.kind] for field in table]
    assert all(end <= field.offset for end, field in zip(ends, table[1:], strict=False))
    assert len({field.name for field in table}) == len(table)


def test_a_line_has_one_writer() -> None:
    for table in (layout.TEAM_FIELDS, layout.WORKER_FIELDS):
        by_line: dict[int, set[str]] = {}
        for field in table:
            by_line.setdefault(field.offset // layout.LINE_BYTES, set()).add(field.writer)
        assert all(len(writers) == 1 for writers in by_line.values())
        flags = [field for field in table if field.writer != "worker"]
        assert len({field.offset // layout.LINE_BYTES for field in flags}) == len(flags)
    assert layout.jobs_offset(3) % layout.LINE_BYTES == layout.WORKER_BYTES % layout.LINE_BYTES == 0


def test_messages_have_the_fields_of_the_layout() -> None:
    assert list(Job._fields) == [field.name for field in layout.JOB_FIELDS]
    assert layout.structure(layout.JOB_FIELDS, layout.JOB_BYTES).size == layout.JOB_BYTES


def test_values_lie_where_the_table_says() -> None:
    buffer = bytearray(256)
    values = {field.name: index + 3 for index, field in enumerate(layout.JOB_FIELDS)}
    Job(**values).write(memoryview(buffer), 64)
    assert not any(buffer[:64]) and not any(buffer[64 + layout.JOB_BYTES :])
    for field in layout.JOB_FIELDS:
        start = 64 + field.offset
        found = int.from_bytes(buffer[start : start + _SIZES[field.kind]], "little", signed=True)
        assert found == values[field.name]
