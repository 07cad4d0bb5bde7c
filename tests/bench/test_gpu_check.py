"""The questions to a GPU: control flow on the CPU device, limits, and verdicts from figures."""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.device.base import DeviceError, Stream
from corun.gpu.device.cpu import CpuDevice
from gpu_checks import asking, graphs, importable, layout, ordering, rig, session
from gpu_checks.asking import NOTE_CPU, ask, run_limited
from gpu_checks.figures import Figures, percentiles, read_figures
from gpu_checks.peer import CompiledWords, PolledWords, choose_words
from gpu_checks.questions import QUESTIONS, run_question
from gpu_checks.verdicts import verdict_of
from support.triton_program import run_triton_program

_SCRIPT = importable.ROOT / "bench" / "gpu_check.py"
_TESTS = importable.ROOT / "tests"
_BARE = str(_TESTS / "support" / "bare")


@pytest.fixture
def bench_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers find this folder as they do below the script."""
    monkeypatch.setenv("PYTHONPATH", str(importable.ROOT / "bench"))


def _run(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def _answer(name: str, folder: Path) -> dict[str, Any]:
    """The figures of a question that is asked in this process."""
    path = folder / f"figures {name}"
    run_question(name, "cpu", 30.0, path)
    return read_figures(path)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The report's questions: two that change their process in one of their own, as users ask."""
    folder = tmp_path_factory.mktemp("asked")
    out = folder / "made" / "report.json"
    code, report = _run("--device", "cpu", "--questions", "7,6,1", "--out", str(out))
    assert code == 0, report
    assert json.loads(out.read_text()) == report
    assert report["note"] == NOTE_CPU
    assert report["machine"]["torch"] == torch.__version__
    questions: dict[str, dict[str, Any]] = report["questions"]
    return questions


def test_questions_run_on_the_cpu_device(asked: dict[str, dict[str, Any]]) -> None:
    assert list(asked) == ["1", "6", "7"], "in the order of their numbers"
    statuses = {name: question["status"] for name, question in asked.items()}
    assert statuses == {"1": "answered", "6": "answered", "7": "skipped"}
    found = asked["6"]["by"]["cpu"]["figures"]
    assert found["worker stopped"]["supervisor_says"] == "found hung, then killed"
    assert found["worker killed"]["supervisor_says"] == "found dead"
    assert "left behind: nothing" in asked["6"]["verdict"]
    cases = asked["1"]["by"]["cpu"]["figures"]
    assert all(cases[f"{name}, memlock 8 MiB"]["copied"] for name in ("memfd", "posix"))


_SAID = {
    "2": "coherent both ways over 3 rounds",
    "3": "beside copies to the device",
    "4": "every payload was there before its flag",
    "5": "went on: kernel on another stream, copy to the device, copy to the host",
    "8": "by address: 0 stale words in 10 launches",
    "ceilings": "GB/s to the host",
}


@pytest.mark.usefixtures("bench_importable")
@pytest.mark.parametrize("name", _SAID)
def test_the_other_questions_run_on_the_cpu_device(name: str, tmp_path: Path) -> None:
    found = _answer(name, tmp_path)
    assert _SAID[name] in verdict_of(name, {"cpu": found}, {"cpu": "answered"})
    if name == "4":
        assert found["so_far"]["rounds"] == layout.TINY.num_ordering_rounds


def test_no_question_is_left_out_of_these_tests(asked: dict[str, dict[str, Any]]) -> None:
    assert {*asked, *_SAID} == {question.name for question in QUESTIONS}


def test_says_that_it_skipped_without_a_gpu() -> None:
    """With nothing but what a bare machine has."""
    code, report = _run(CUDA_VISIBLE_DEVICES="", PYTHONPATH=_BARE)
    assert code == 0
    assert report["status"] == "skipped"
    assert "no CUDA device" in report["skipped"]
    assert report["questions"] == {}


def test_a_bare_machine_has_all_that_questions_need() -> None:
    """Without numba and the like: every import, and a worker that polls."""
    paths = os.pathsep.join([_BARE, str(_TESTS), str(importable.ROOT / "bench")])
    done = subprocess.run(
        [sys.executable, "-m", "support.bare_machine"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["posix"] is False and found["numba"] is False
    assert found["worker_words"].startswith("polled by Python")
    assert "No module named 'numba' on a bare machine" in done.stderr
    assert "a round trip takes" in verdict_of("3", {"cuda": found}, {"cuda": "answered"})


def test_a_question_that_does_not_exist_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), "--questions", "2,9"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no '9'; choose from: 1, 2, 3" in done.stderr


def test_what_does_not_fit_into_the_total_time_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "begin_report", lambda *_, **__: {})
    assert not session.Session("cpu", total_s=1.0).run(["2"], out=None, importable="installed")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["status"] == "incomplete"
    assert report["questions"]["2"]["status"] == "timed-out"
    assert "was not measured" in report["questions"]["2"]["verdict"]


_HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(60)
"""


def test_a_process_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    start_s = time.monotonic()
    status, error = run_limited([sys.executable, "-c", _HANGS, str(note)], 1.0)
    assert time.monotonic() - start_s < 30
    assert status == "timed-out"
    assert error is not None and "1 s" in error
    stat = Path(f"/proc/{int(note.read_text())}/stat")
    deadline_s = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class _Unkillable:
    """Stands for a process that its driver does not let go of; its pid is nobody's."""

    def __init__(self) -> None:
        ended = subprocess.Popen([sys.executable, "-c", "pass"])
        ended.wait()
        self.pid = ended.pid

    def wait(self, timeout_s: float) -> int:
        raise subprocess.TimeoutExpired("a question", timeout_s)


def test_a_process_that_cannot_be_killed_does_not_hold_up_the_others() -> None:
    kept: deque[str] = deque()
    asking._kill(_Unkillable(), kept)  # type: ignore[arg-type]
    assert "still there 20 s after SIGKILL" in kept[0]


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_cuda_refuses_to_capture_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    modes = []

    @contextmanager
    def capture(graph: object, *, stream: object, capture_error_mode: str) -> Iterator[None]:
        modes.append(capture_error_mode)
        yield
        if is_refused:
            raise RuntimeError("the capture is invalid")

    def enqueue() -> None:
        if is_refused:
            raise DeviceError("cuStreamWaitValue32 is not permitted")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    said = graphs._capture(None, enqueue)  # type: ignore[arg-type]
    refusals = "cuStreamWaitValue32 is not permitted; the capture is invalid"
    assert said == (refusals if is_refused else None)
    assert modes == ["thread_local"]


def test_a_process_that_fails_leaves_its_words_and_its_figures(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "pathlib.Path(sys.argv[-1]).write_text('{\"half\": 1}')\n"
        "sys.exit('the context is poisoned')\n"
    )
    answer = ask(script, "2", "stream-op", 30.0)
    assert answer.status == "failed"
    assert answer.error is not None and "the context is poisoned" in answer.error
    assert answer.figures == {"half": 1}
    assert run_limited([sys.executable, "-c", "pass"], 20.0) == ("answered", None)


def test_figures_are_there_after_every_one(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    assert read_figures(path) == {}
    figures = Figures(path)
    figures.put("a", {"b": 1})
    assert read_figures(path) == {"a": {"b": 1}}
    figures.add("rows", 1)
    figures.add("rows", 2)
    assert read_figures(path) == {"a": {"b": 1}, "rows": [1, 2]}
    assert percentiles([1.0, 2.0, 9.0]) == {"p50": 2.0, "p99": 8.86, "max": 9.0, "num": 3}


def test_the_checkout_is_importable_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importable, "_is_importable", lambda: False)
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert importable.make_importable() == "linked"
    link = Path(sys.path[0]) / "corun"
    assert link.resolve() == importable.ROOT
    script = "import corun.shm.words, gpu_checks.layout; print(corun.shm.words.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.strip() == str(link / "shm" / "words.py"), done.stderr
    assert os.environ["PYTHONPATH"].endswith("/nowhere")


@pytest.mark.usefixtures("bench_importable")
@pytest.mark.parametrize(("words", "expected"), [("auto", "compiled"), ("polled", "polled")])
def test_a_worker_answers_with_and_without_compiled_words(words: str, expected: str) -> None:
    def work(made: rig.Rig) -> None:
        made.start_peer("echo", num_rounds=3, words=words)
        assert made.peer_words.startswith(expected)
        for sequence in (1, 2, 3):
            made.device.signal(made.transfer, made.word(layout.READY), sequence)
            made.device.wait(made.transfer, made.word(layout.DONE), sequence)
        made.synchronize()
        assert made.load(layout.DONE) == 3

    rig.use_rig("cpu", 30.0, work)


def test_polled_words_are_taken_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_words("auto"), CompiledWords)
    monkeypatch.setattr(CompiledWords, "__init__", _raise_import_error)
    words = choose_words("auto")
    assert isinstance(words, PolledWords)
    value = torch.zeros(1, dtype=torch.int32)
    assert not words.spin(value.data_ptr(), 5, 0.001)
    words.store(value.data_ptr(), 5)
    assert words.load(value.data_ptr()) == 5
    assert words.spin(value.data_ptr(), 5, 0.001)


def _raise_import_error(_: object) -> None:
    raise ImportError("no numba")


class _FlagFirst(CpuDevice):
    """A device whose copies come after the signals that were enqueued behind them."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[tuple[Stream, torch.Tensor, torch.Tensor]] = []

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._late.append((stream, destination, source))

    def signal(self, stream: Stream, word: Any, value: int) -> None:
        super().signal(stream, word, value)
        self.launch(stream, lambda: time.sleep(0.002))
        self._copy_late()

    def synchronize(self, stream: Stream | None = None, *, timeout_s: float) -> None:
        self._copy_late()
        super().synchronize(stream, timeout_s=timeout_s)

    def _copy_late(self) -> None:
        while self._late:
            super().copy(*self._late.pop(0))


@pytest.mark.usefixtures("bench_importable")
def test_the_ordering_question_finds_a_flag_before_its_payload(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rig, "open_device", lambda kind: _FlagFirst())
    figures = Figures(tmp_path / "figures")
    ordering.ordering("cpu", 60.0, figures)
    to_worker = figures.values["so_far"]["to_worker"]
    assert to_worker["wrong_words"] > to_worker["planted"]
    assert "wrong words to_worker" in verdict_of("4", {"cpu": figures.values}, {"cpu": "answered"})


def test_a_million_rounds_are_mostly_small_and_slots_do_not_overlap() -> None:
    sizes = [layout.payload_bytes(s, is_tiny=False) for s in range(1, 100_001)]
    assert {4 << 10, 64 << 10, 512 << 10, 2 << 20} == set(sizes)
    assert sizes.count(4 << 10) > 0.9 * len(sizes)
    assert 10 * sum(sizes) < 32 << 30  # both ways in a second or two of any link
    for is_tiny in (False, True):
        assert max(sizes if not is_tiny else [8 << 10]) <= layout.slot_bytes(is_tiny=is_tiny)
        assert layout.segment_bytes(is_tiny=is_tiny) % 4096 == 0
    assert layout.STAMPS_OFFSET + 8 * layout.MAX_STAMPS <= layout.X_OFFSET
    assert layout.STARTED + 64 <= layout.STAMPS_OFFSET
    rounds = layout.FULL.num_batches * layout.FULL.batch_rounds
    assert 2 * rounds <= layout.MAX_STAMPS


def _case(**changes: Any) -> dict[str, Any]:
    return {"wrong_words": 8, "planted": 8, **changes}


def _ordered(**changes: Any) -> dict[str, Any]:
    ways = {"to_worker": _case(), "to_device_zero_copy": _case(), "to_device_by_copy": _case()}
    return {
        "rounds_wanted": 100,
        "so_far": {"rounds": 100, "gib_each_way": 1.0, **ways, **changes},
    }


_QUEUE = {
    "calls_before_one_blocked": 1023,
    "tried": 8192,
    "blocked_ms": 1900.0,
    "longest_pause_of_another_thread_ms": 1.2,
}
_QUEUES = {"launch queue": _QUEUE, "record queue": _QUEUE}
_HELD = {**_QUEUE, "longest_pause_of_another_thread_ms": 1899.0}
_LOST = {
    "was_held": True, "worker_is_gone": True, "device_computes": True,
    "supervisor_exit_code": 0, "recovered_ms": 9.0,
}  # fmt: skip
_RECOVERED = {
    "worker killed": _LOST, "worker stopped": _LOST, "segments_left": [], "descriptors_left": 0,
    "waiter killed": {"processes_gone_ms": 3.0},
}  # fmt: skip
_REPLAYED = {
    "captured": True, "replays": 9, "us_per_replay": 5.0, "wrong_words_to_worker": 0,
    "wrong_words_to_device": 0, "rounds_counted_by_device": 9,
}  # fmt: skip
_REGISTERED = {"registered": True, "is_pinned": True, "was_queued": True, "copy_call_us": 9.0}
_READ = {"accepted": True, "found": 5, "planted": 5, "stale_words": 0, "num_launches": 7}


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("4", _ordered(), "every payload was there before its flag"),
        ("4", _ordered(to_worker=_case(wrong_words=9)), "1 wrong words to_worker"),
        ("4", _ordered(to_worker=_case(wrong_words=7)), "the check is blind"),
        ("4", _ordered(rounds=60), "fewer than 100 rounds"),
        ("5", {**_QUEUES, "a": {"went_on": True}}, "went on: a; stood still or failed: nothing"),
        ("5", {**_QUEUES, "a": {"went_on": True}}, "lock free; record 1024 blocked for 1900.0 ms"),
        (
            "5",
            {**_QUEUES, "launch queue": _HELD, "a": {"went_on": False}},
            "stood still or failed: a; launch 1024 blocked for 1900.0 ms with Python's lock HELD",
        ),
        (
            "5",
            {**_QUEUES, "record queue": {**_QUEUE, "calls_before_one_blocked": None}},
            "8192 times record did not fill the queue",
        ),
        ("6", _RECOVERED, "left behind: nothing"),
        ("6", {**_RECOVERED, "segments_left": ["corun-1"]}, "left behind: corun-1"),
        (
            "6",
            {**_RECOVERED, "worker killed": {**_LOST, "device_computes": False}},
            "worker killed: NOT properly recovered",
        ),
        ("7", _REPLAYED, "0 wrong words"),
        ("7", {**_REPLAYED, "rounds_counted_by_device": 8}, "did not run every replay"),
        ("7", {"captured": False, "error": "not permitted"}, "not captured: not permitted"),
        ("1", {"may_lock_without_limit": False, "memfd": _REGISTERED}, "are asynchronous"),
        (
            "1",
            {"may_lock_without_limit": True, "memfd": {**_REGISTERED, "copy_call_us": 900.0}},
            "NOT asynchronous",
        ),
        (
            "1",
            {"may_lock_without_limit": False, "memfd": {"registered": False}},
            "memfd: refused",
        ),
        ("8", {"tensor": _READ}, "by tensor: 0 stale words in 7 launches"),
        ("8", {"tensor": {**_READ, "found": 0}}, "blind"),
        ("8", {"tensor": {"accepted": False}}, "not accepted"),
        (
            "2",
            {
                "num_rounds": 3,
                "wrong_words": {"copy_to_device": 4, "copy_to_host": 0},
                "planted_words": {"planted": 1, "found": 1},
                "device_address_is_host_address": False,
            },
            "wrong words {'copy_to_device': 4} over 3 rounds, device addresses are NOT the host's",
        ),
        ("3", {"worker_words": "compiled"}, "no verdict, 'on an idle link' was not measured"),
    ],
)
def test_verdicts_follow_from_the_figures(name: str, found: dict[str, Any], expected: str) -> None:
    verdict = verdict_of(name, {"triton": found}, {"triton": "answered"})
    assert expected in verdict
    assert verdict.startswith("triton: ")
    assert "(timed-out)" in verdict_of(name, {"triton": found}, {"triton": "timed-out"})


def test_the_kernel_counts_wrong_words_in_the_interpreter() -> None:
    found = json.loads(run_triton_program("triton_count_words", TRITON_INTERPRET="1"))
    assert found == {"tensor": 3, "address": 3, "volatile": 3}
