"""``--request-log``: lines, rotation, full disks, files moved; and warnings of clients, one a minute."""

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import ConfigError
from corun.runtime.server.connection import MinuteLog
from corun.runtime.server.request_log import RequestLog, request_log_of
from corun.runtime.server.request_records import HttpRequestRecord

WAIT = Callable[..., None]


def record(number: int) -> HttpRequestRecord:
    return HttpRequestRecord(
        arrived_at=1.5,
        id=f"cmpl-{number}",
        route="/v1/completions",
        model="m",
        adapter=None,
        stream=False,
        outcome="finished",
        status=200,
        error=None,
        total_s=0.25,
        prompts=[],
    )


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


@contextmanager
def opened(path: Path | str, *, max_bytes: int = 1 << 20) -> Iterator[RequestLog]:
    log = RequestLog(str(path), max_bytes=max_bytes)
    try:
        yield log
    finally:
        log.close()


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for numbers in (range(3), range(3, 5)):
        with opened(path) as log:
            for number in numbers:
                log.write(record(number))
    assert ids(path) == [f"cmpl-{number}" for number in range(5)]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "arrived_at": 1.5,
        "id": "cmpl-0",
        "route": "/v1/completions",
        "model": "m",
        "adapter": None,
        "stream": False,
        "outcome": "finished",
        "status": 200,
        "error": None,
        "total_s": 0.25,
        "prompts": [],
    }


def test_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with opened("-") as log:
        log.write(record(1))
    assert json.loads(capfd.readouterr().out)["id"] == "cmpl-1"


def test_a_large_file_makes_room_and_five_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with opened(tmp_path / "one") as log:
        log.write(record(10))
    line_bytes = (tmp_path / "one").stat().st_size
    with opened(path, max_bytes=2 * line_bytes) as log:
        for number in range(10, 25):
            log.write(record(number))
    files = [path, *(path.with_name(f"log.{number}") for number in range(1, 5))]
    assert sorted(tmp_path.glob("log*")) == sorted(files)
    kept = [name for file in reversed(files) for name in ids(file)]
    assert kept == [f"cmpl-{number}" for number in range(16, 25)]


def test_two_servers_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with opened(path, max_bytes=600) as one, opened(path, max_bytes=600) as other:
        for number in range(8):
            (one, other)[number % 2].write(record(number))
            wait_for_line(tmp_path, number)
    found = [name for file in tmp_path.iterdir() for name in ids(file)]
    assert sorted(found) == [f"cmpl-{number}" for number in range(8)]
    assert all(file.stat().st_size <= 600 for file in tmp_path.iterdir())


def texts_in(directory: Path) -> Iterator[str]:
    for file in directory.iterdir():
        with suppress(FileNotFoundError):  # it has just got another name
            yield file.read_text()


def wait_for_line(directory: Path, number: int) -> None:
    deadline_s = time.monotonic() + 20
    while not any(f"cmpl-{number}" in text for text in texts_in(directory)):
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_file_that_is_moved_or_deleted_is_made_again(tmp_path: Path, is_deleted: bool) -> None:
    path = tmp_path / "log"
    with opened(path) as log:
        log.write(record(1))
        wait_for_line(tmp_path, 1)
        path.unlink() if is_deleted else path.rename(tmp_path / "moved")
        log.write(record(2))
    assert ids(path) == ["cmpl-2"]


def test_a_full_disk_costs_lines_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), opened("/dev/full") as log:
        for number in range(20):
            log.write(record(number))
    (said,) = caplog.messages
    assert said == (
        "--request-log /dev/full: cannot write, lines are lost: No space left on device; requests "
        "are served as before"
    )


def test_a_disk_that_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, wait_until: WAIT
) -> None:
    path, write = tmp_path / "log", os.write
    tried: list[bytes] = []

    def write_some(fd: int, data: bytes) -> int:
        tried.append(data)
        if len(tried) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:7])

    with caplog.at_level(logging.WARNING), opened(path) as log:
        monkeypatch.setattr(os, "write", write_some)
        for number in range(3):
            log.write(record(number))
        wait_until(lambda: len(tried) == 4)
        monkeypatch.undo()
        log.write(record(3))
    torn, whole = path.read_text().splitlines()
    assert (torn, json.loads(whole)["id"]) == ('{"arriv', "cmpl-3")
    assert [message.partition(": ")[2][:13] for message in caplog.messages] == [
        "cannot write,",
        "writing works",
    ]
    assert "3 lines are missing" in caplog.messages[1]


def test_a_reader_that_hangs_holds_nothing_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    log = RequestLog(f"/proc/self/fd/{writing}", max_bytes=1 << 20)
    with caplog.at_level(logging.ERROR):
        for number in range(12_000):
            log.write(record(number))
    assert "writing is slower than requests end" in caplog.messages[0]
    os.close(reading)
    log.close()
    os.close(writing)


@pytest.mark.parametrize("name", ["missing/log", "."])
def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    config = ServeConfig(request_log=str(path))
    with pytest.raises(ConfigError, match=r"--request-log '.*' cannot be written: "), request_log_of(config):
        raise AssertionError("it was opened")


def test_without_the_option_there_is_none() -> None:
    with request_log_of(ServeConfig()) as log:
        assert log is None


class OneTimer:
    """A loop with a single timer, which the test lets end."""

    def __init__(self) -> None:
        self.due: Callable[[], None] | None = None

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> object:
        assert self.due is None and delay_s == 60.0
        self.due = lambda: call(*arguments)
        return self

    def pass_a_minute(self) -> None:
        due, self.due = self.due, None
        assert due is not None
        due()


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    loop: Any = OneTimer()
    log = MinuteLog("%d of kind %s", "x")

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    for _ in range(100):
        log.count(loop)
    assert lines() == ["1 of kind x"]
    loop.pass_a_minute()
    assert lines() == ["99 of kind x"]
    log.count(loop)
    assert lines() == []
    loop.pass_a_minute()
    assert lines() == ["1 of kind x"]
    loop.pass_a_minute()
    assert lines() == [] and loop.due is None
    log.count(loop)
    assert lines() == ["1 of kind x"]
