"""Warnings that clients cause are one line a minute."""

from collections.abc import Callable
from typing import Any

import pytest
from corun.runtime.server.connection import MinuteLog


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
