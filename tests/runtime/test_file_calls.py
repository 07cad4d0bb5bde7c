"""Calls to file systems end, even if the file systems do not answer."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from corun.runtime import file_calls
from corun.runtime.file_calls import FILES, FileCalls, Place, SilentError, is_directory

_SOON_S = 20.0
_SHORT_S = 0.05


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_calls, "_SLICE_S", _SHORT_S)


class Mount:
    """A file system that answers when a test says so."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self._calls: list[Place] = []

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def read(self, place: Place) -> str:
        self._calls.append(place)
        assert self.answers.wait(_SOON_S)
        return "content"


@pytest.fixture
def dead() -> Iterator[Mount]:
    mount = Mount()
    yield mount
    mount.answers.set()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_call_returns_or_raises_what_its_function_does() -> None:
    files = FileCalls()
    assert files.call(lambda _: 3, "/a") == 3
    with pytest.raises(FileNotFoundError):
        files.call(lambda _: Path("/no/such/file").read_bytes(), "/a")
    with pytest.raises(TimeoutError) as caught:  # of the function itself
        files.call(lambda _: (_ for _ in ()).throw(TimeoutError("its own")), "/a")
    assert not isinstance(caught.value, SilentError) and not files.is_silent("/a")


def test_one_thread_makes_calls_that_follow_each_other() -> None:
    files = FileCalls()
    threads = {files.call(lambda _: threading.get_ident(), "/a") for _ in range(100)}
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.parametrize(("path", "is_own"), [("/a", True), ("/a/b", True), ("/b", False)])
def test_a_call_inside_another_one_for_its_path_needs_no_second_thread(path: str, is_own: bool) -> None:
    files = FileCalls()
    outer, inner = files.call(
        lambda _: (threading.get_ident(), files.call(lambda _: threading.get_ident(), path)), "/a"
    )
    assert (outer == inner) == is_own


def test_calls_inside_another_one_are_its_progress(dead: Mount) -> None:
    files = FileCalls()

    def outer(place: Place) -> tuple[int, int]:
        before = place.num_steps
        return before, files.call(lambda inner: inner.num_steps, "/a/b")

    assert files.call(outer, "/a") == (0, 1)
    ended: list[BaseException] = []

    def late(place: Place) -> None:
        dead.read(place)
        try:
            files.call(lambda _: None, "/a")
        except SilentError as error:
            ended.append(error)

    with pytest.raises(SilentError):
        files.call(late, "/a", 0.1)
    dead.answers.set()
    wait_until(lambda: bool(ended))  # nothing waits for it any more


def test_a_call_inside_another_one_for_another_path_has_its_own_deadline(dead: Mount) -> None:
    files = FileCalls()

    def outer(_: Place) -> str:
        try:
            return files.call(dead.read, "/mnt/dead", 0.1)
        except SilentError:
            return "without it"

    assert files.call(outer, "/a") == "without it"
    assert files.is_silent("/mnt/dead") and not files.is_silent("/a")


def test_a_file_system_that_does_not_answer_holds_one_thread(
    dead: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    files = FileCalls()
    with pytest.raises(SilentError, match=r"does not answer within 0\.1 s") as caught:
        files.call(dead.read, "/mnt/dead", 0.1)
    assert caught.value.filename == "/mnt/dead" and isinstance(caught.value, OSError)
    begin_s = time.monotonic()
    for path in ("/mnt/dead", "/mnt/dead/adapter"):
        for _ in range(100):
            with pytest.raises(SilentError):
                files.call(dead.read, path, _SOON_S)
    assert time.monotonic() - begin_s < _SOON_S / 2
    wait_until(lambda: dead.num_calls > 0)  # its thread may be late
    assert dead.num_calls == 1
    assert files.call(lambda _: "other", "/mnt/dead2") == "other"
    assert "/mnt/dead: the file system does not answer" in caplog.text


def test_what_answers_again_is_read_again(dead: Mount, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    files = FileCalls()
    with pytest.raises(SilentError):
        files.call(dead.read, "/mnt/dead", 0.1)
    dead.answers.set()
    wait_until(lambda: not files.is_silent("/mnt/dead"))
    assert files.call(dead.read, "/mnt/dead") == "content"
    wait_until(lambda: "the file system answers again" in caplog.text)


def test_only_so_many_threads_wait(dead: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_calls, "_MAX_SILENT", 3)
    files = FileCalls()
    for number in range(5):
        with pytest.raises(SilentError):
            files.call(dead.read, f"/mnt/{number}", 0.1)
    wait_until(lambda: dead.num_calls >= 3)  # their threads may be late
    assert dead.num_calls == 3


def test_progress_extends_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two waits; the function makes a step in each of the first twenty."""
    waits, steps = threading.Semaphore(0), threading.Semaphore(0)
    left = iter(range(20))
    real_wait = Future[Any].exception

    def wait(future: Future[Any], _: float) -> BaseException | None:
        if next(left, None) is None:
            return real_wait(future, _SOON_S)
        waits.release()
        assert steps.acquire(timeout=_SOON_S)
        raise TimeoutError

    def slow(place: Place) -> int:
        for number in range(20):
            assert waits.acquire(timeout=_SOON_S)
            place.move(f"/a/{number}")
            steps.release()
        return place.num_steps

    monkeypatch.setattr(Future, "exception", wait)
    assert FileCalls().call(slow, "/a", 2 * _SHORT_S) == 20


def test_what_a_call_waits_for_is_silent(dead: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FileCalls()
    real_wait = Future[Any].exception

    def wait(future: Future[Any], timeout_s: float) -> BaseException | None:
        wait_until(lambda: dead.num_calls > 0)
        return real_wait(future, timeout_s)

    def stuck_at(place: Place) -> str:
        place.move("/a/stuck")
        return dead.read(place)

    monkeypatch.setattr(Future, "exception", wait)
    with pytest.raises(SilentError) as caught:
        files.call(stuck_at, "/a", 2 * _SHORT_S)
    assert caught.value.filename == "/a/stuck"
    assert files.is_silent("/a/stuck") and not files.is_silent("/a")


def test_a_call_that_was_left_ends_at_its_next_step(dead: Mount) -> None:
    files = FileCalls()
    passed = threading.Event()

    def read(place: Place) -> None:
        dead.read(place)
        place.step()
        passed.set()

    with pytest.raises(SilentError):
        files.call(read, "/a", 0.1)
    dead.answers.set()
    wait_until(lambda: not files.is_silent("/a"))
    assert not passed.is_set()


def test_an_event_loop_goes_on_meanwhile(dead: Mount) -> None:
    files = FileCalls(_SOON_S)

    async def run() -> None:
        waiting = [asyncio.ensure_future(files.answer(dead.read, f"/mnt/{number}")) for number in range(10)]
        assert await files.answer(lambda _: "other", "/a") == "other"
        assert await asyncio.to_thread(lambda: "the default pool is free")
        files.timeout_s = _SHORT_S
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, SilentError)
        # Work that consists of calls has no deadline of its own, and its calls have theirs.
        with pytest.raises(SilentError):
            await files.answer(lambda _: files.call(dead.read, "/b", 0.1), "/b", has_deadline=False)

    asyncio.run(run())


def test_a_caller_that_is_cancelled_harms_no_thread(dead: Mount) -> None:
    files = FileCalls()

    async def run() -> None:
        asking = asyncio.ensure_future(files.answer(dead.read, "/a"))
        while not dead.num_calls:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        dead.answers.set()
        assert await files.answer(dead.read, "/a") == "content"

    asyncio.run(run())


def test_a_call_whose_caller_was_cancelled_keeps_its_deadline(dead: Mount) -> None:
    """So that clients that leave cannot occupy more and more threads."""
    files = FileCalls(4 * _SHORT_S)

    async def run() -> None:
        asking = asyncio.ensure_future(files.answer(dead.read, "/a"))
        while not dead.num_calls:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while not files.is_silent("/a"):
            await asyncio.sleep(0.001)
        with pytest.raises(SilentError):
            await files.answer(dead.read, "/a/b")
        assert dead.num_calls == 1

    asyncio.run(asyncio.wait_for(run(), _SOON_S))


def test_a_directory_that_does_not_answer_may_exist(
    dead: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert is_directory(str(tmp_path)) is True
    assert is_directory(str(tmp_path / "file")) is is_directory(str(tmp_path / "x")) is False
    monkeypatch.setattr(file_calls, "_SOON_S", 0.1)
    monkeypatch.setattr(os.path, "isdir", dead.read)
    assert is_directory("/mnt/dead") is None
    dead.answers.set()
    wait_until(lambda: not FILES.is_silent("/mnt/dead"))
