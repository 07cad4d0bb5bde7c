"""The questions to a GPU, on a GPU of threads with faults; limits; and decisions."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.check import report, rig
from corun.gpu.check.peer import TINY
from corun.gpu.check.questions import BOTH, QUESTIONS, Findings, Question, run_question
from corun.gpu.check.report import (
    NO_GPU,
    NOTE_CPU,
    GpuReport,
    ask,
    decide,
    faults_of,
    run_limited,
    without_folders,
)
from corun.gpu.device import cuda_memory
from corun.gpu.device.cuda import CudaDevice
from corun.runtime.errors import ConfigError
from support.cuda.fake_cuda import FakeGpu, FakeRuntime, FakeStream, fake_device, noted_memory


class _Gpu(FakeGpu):
    """Goes wrong only when the device was probed and found well."""

    later: frozenset[str] = frozenset()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Gpu]:
    """What questions open instead of CUDA, with tiny sizes."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda_memory, "HostMemory", noted_memory(ranges))
    monkeypatch.setattr(rig, "FULL", TINY)
    made = _Gpu(host_ranges=ranges)
    with ExitStack() as stack:

        def open_device(kind: str) -> tuple[CudaDevice, torch.device]:
            device, _ = stack.enter_context(fake_device(made, sync=kind, wait_timeout_s=30.0))
            made.faults |= made.later
            return device, torch.device("cpu")

        monkeypatch.setattr(rig, "open_device", open_device)
        yield made


def _answer(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """What a question finds that is asked in this process."""
    figures = Findings(folder / f"{name} {kind}")
    run_question(name, kind, 60.0, figures)
    return {name: {kind: {"status": "answered", "figures": figures.values}}}


def _asked() -> list[tuple[str, str]]:
    return [(question.name, kind) for question in QUESTIONS for kind in question.kinds if kind in BOTH]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "kind"), _asked())
def test_questions_find_nothing_wrong_with_a_gpu_that_is_well(name: str, kind: str, tmp_path: Path) -> None:
    found = _answer(tmp_path, name, kind)[name][kind]["figures"]
    if name in {"memory", "order"}:
        faults = faults_of({name: {kind: {"status": "answered", "figures": found}}}, kind)
        assert [fault for fault in faults if fault.startswith(name)] == []
        assert all(way["words"] > 0 for way in found["wrong"].values()), "planted ones"
    if name == "memory":
        assert found["copy_was_queued"]
    if name == "order":
        assert found["rounds"] == TINY.num_rounds
    if name.startswith("streams"):
        assert found["num_streams"] == 12 and found["held_up"] == []
    if name == "round-trip":
        assert found["round_trip_us"]["num"] == 8
    if name == "link":
        assert found["to_device_gb_per_s"] > 0 < found["to_host_gb_per_s"]


@pytest.mark.parametrize(
    ("name", "fault", "expected"),
    [("memory", "stale", "wrong words to_device"), ("order", "signal comes first", "to_host")],
)
def test_questions_find_what_is_wrong(
    gpu: _Gpu, name: str, fault: str, expected: str, tmp_path: Path
) -> None:
    gpu.later = frozenset({fault})
    faults = faults_of(_answer(tmp_path, name, "stream"), "stream")
    assert any(f.startswith(name) and f.endswith(expected) for f in faults), faults


def test_a_way_that_does_not_work_is_an_answer(gpu: _Gpu, tmp_path: Path) -> None:
    gpu.faults = frozenset({"write_value"})
    found = _answer(tmp_path, "round-trip", "stream")["round-trip"]["stream"]["figures"]
    assert list(found) == ["refused"]
    assert "cuStreamWriteValue32 returned CUDA_ERROR_NOT_SUPPORTED" in found["refused"]


def test_streams_that_share_a_queue_with_one_that_waits_are_named(
    gpu: _Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = FakeRuntime.make_stream
    made: list[FakeStream] = []

    def share(runtime: FakeRuntime, *, is_urgent: bool) -> FakeStream:
        # The first is the probes', the second the one that waits.
        made.append(made[-8] if len(made) >= 8 else make(runtime, is_urgent=is_urgent))
        return made[-1]

    monkeypatch.setattr(FakeRuntime, "make_stream", share)
    found = _answer(tmp_path, "streams-8", "stream")["streams-8"]["stream"]["figures"]
    assert found["held_up"] == ["other 7"]


def _well(kind: str, **changes: Any) -> dict[str, Any]:
    wrong = {way: {"words": 8, "planted": 8} for way in ("to_device", "to_host")}
    return {"status": "answered", "figures": {"wrong": wrong, "held_up": [], **changes}}


def _answers(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    made = {question.name: {kind: _well(kind) for kind in question.kinds} for question in QUESTIONS}
    for name, by_kind in changes.items():
        made[name.replace("_", "-")] |= by_kind
    return made


def _wrong(words: int, planted: int = 8) -> dict[str, Any]:
    return _well("", wrong={"to_host": {"words": words, "planted": planted}})


@pytest.mark.parametrize(
    ("changes", "expected", "fault"),
    [
        ({}, "stream", None),
        ({"memory": {"stream": _wrong(9)}}, "host", "memory: 1 wrong words to_host"),
        ({"order": {"stream": _wrong(9)}}, "host", "order: 1 wrong words to_host"),
        ({"order": {"stream": _wrong(7)}}, "host", "order: the check to_host is blind"),
        ({"order": {"stream": _wrong(0, 0)}}, "host", "order: the check to_host is blind"),
        ({"memory": {"stream": _well("", refused="why")}}, "host", "memory: why"),
        ({"order": {"stream": {"status": "timed-out", "figures": {}}}}, "host", "order: timed-out"),
        ({"order": {"stream": _wrong(9), "host": _wrong(9)}}, None, "order: 1 wrong words to_host"),
    ],
)
def test_streams_are_taken_unless_something_speaks_against_them(
    changes: dict[str, Any], expected: str | None, fault: str | None
) -> None:
    decision = decide(_answers(**changes))
    assert decision["device_sync"] == expected
    assert decision["faults"]["stream"] == ([] if fault is None else [fault])


def test_nothing_is_decided_by_what_was_not_asked() -> None:
    decision = decide({})
    assert decision["device_sync"] is None and decision["CUDA_DEVICE_MAX_CONNECTIONS"] is None
    assert decision["faults"] == {
        "stream": ["memory: not asked", "order: not asked"],
        "host": ["order: not asked"],
    }


@pytest.mark.parametrize(
    ("with_8", "with_32", "expected"), [([], [], "8"), (["a"], [], "32"), (["a"], ["a"], None)]
)
def test_as_few_queues_as_let_every_stream_go_on(
    with_8: list[str], with_32: list[str], expected: str | None
) -> None:
    by_queues = {
        "streams_8": {"stream": _well("", held_up=with_8)},
        "streams_32": {"stream": _well("", held_up=with_32)},
    }
    assert decide(_answers(**by_queues))["CUDA_DEVICE_MAX_CONNECTIONS"] == expected


_HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(60)
"""


def test_a_process_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = [sys.executable, "-c", _HANGS, str(note)]
    for limit_s in (1.0, 5.0, 25.0):  # on a busy machine it has not begun within the first
        assert run_limited(command, limit_s, tmp_path / "said", os.environ) is None
        if note.exists() and note.read_text():
            break
    stat = Path(f"/proc/{int(note.read_text())}/stat")
    deadline_s = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_an_interrupted_call_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if not made:
                made.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_limited(["sleep", "60"], 60.0, tmp_path / "said", os.environ)
    assert made[0].returncode == -signal.SIGKILL


def test_a_process_that_fails_leaves_its_words_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[-1]).write_text('{\"queues\": %s}' % os.environ['QUEUES'])\n"
        "sys.exit('the context is poisoned')\n"
    )
    monkeypatch.setattr(report, "PROGRAM", (sys.executable, str(script)))
    asked = Question("order", BOTH, 30.0, ".none", num_queues="8")
    monkeypatch.setattr(Question, "environment", {"QUEUES": "8"})
    answer = ask(asked, "stream")
    assert answer["status"] == "failed" and answer["figures"] == {"queues": 8}
    assert answer["error"] == "the context is poisoned"


def test_an_error_names_no_folders_of_the_owner() -> None:
    text = (
        'File "/home/Ann Doe/v/lib/corun/gpu/check/rig.py", line 3, in close\n'
        "OSError: no file '/home/ann/models/x/config.json' (https://pytorch.org/docs/cuda.html)"
    )
    assert without_folders(text) == (
        'File ".../check/rig.py", line 3, in close\n'
        "OSError: no file '.../x/config.json' (https://pytorch.org/docs/cuda.html)"
    )


def _report(path: Path, **machine: str) -> GpuReport:
    return GpuReport(path, "cuda", {"gpu": "A10", "torch": "2.13", **machine})


def test_a_report_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """What is answered is kept; what has failed is asked again."""
    path = tmp_path / "report.json"
    _report(path).put("memory", "stream", _well(""))
    _report(path).put("link", "stream", {"status": "failed", "figures": {}, "error": "lost"})
    again = _report(path)
    assert again.has_answer("memory", "stream") and not again.has_answer("link", "stream")
    assert not again.has_answer("link", "host")
    again.put("link", "stream", _well("", rate=1))
    kept = json.loads(path.read_text())
    assert set(kept["answers"]) == {"memory", "link"} and kept["status"] == "answered"
    assert kept["answers"]["link"]["stream"]["figures"]["rate"] == 1
    assert kept["machine"] == {"gpu": "A10", "torch": "2.13"}
    assert kept["decision"]["faults"]["host"] == ["order: not asked"]


def test_a_report_that_was_cut_off_says_what_was_not_asked(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    _report(path).expect([("memory", "stream"), ("link", "stream")])
    again = _report(path)
    again.put("memory", "stream", _well(""))
    again.expect([("memory", "stream")])
    kept = json.loads(path.read_text())
    statuses = [kept["answers"][name]["stream"]["status"] for name in ("memory", "link")]
    assert statuses == ["answered", "not asked"] and kept["status"] == "incomplete"
    assert not again.has_answer("link", "stream")


def test_a_report_is_not_continued_on_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    _report(path).save()
    with pytest.raises(ConfigError, match=r"other versions: torch \(2\.13 then, 2\.14 now\); name another"):
        _report(path, torch="2.14")


_NO_MACHINE = '{"format": "corun.gpu.check 1", "answers": {}}'


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "of another", "answers": {}, "machine": {}}', _NO_MACHINE]
)
def test_other_files_are_not_reports(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a report of this program"):
        _report(path)
    assert path.read_text() == text


def _run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "corun.gpu.check", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_the_control_flow_runs_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    command = ["--device", "cpu", "--questions", "order", "--report", str(path)]
    done = _run(*command)
    assert done.returncode == 0, done.stderr
    assert "[1 of 1] order (cpu), 80 s at most" in done.stdout
    kept = json.loads(path.read_text())
    assert kept["note"] == NOTE_CPU and kept["machine"]["torch"] == torch.__version__
    assert list(kept["answers"]) == ["order"] and "decision" not in kept
    assert faults_of(kept["answers"], "cpu") == ["memory: not asked"]
    program = importlib.import_module("corun.gpu.check.__main__")
    monkeypatch.setattr(program, "find_machine", lambda _: kept["machine"])
    assert program.main(command) == 0
    assert "order (cpu): answered earlier" in capsys.readouterr().out
    assert json.loads(path.read_text()) == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "--report FILE is missing"), (("--report", "missing/r"), "its folder does not exist")],
)
def test_a_wrong_call_asks_nothing(arguments: tuple[str, ...], message: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_a_machine_without_cuda_is_told_so_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = _run("--report", str(path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stdout == "" and not path.exists()
    assert done.stderr == f"python -m corun.gpu.check: {NO_GPU}\n"
