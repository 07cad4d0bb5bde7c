"""The questions to a GPU, on a GPU of threads with faults; limits; and decisions."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from corun.gpu.device import cuda_memory
from corun.gpu.device.cuda import CudaDevice
from gpu_check import QUESTIONS, Figures, ask, decide, faults_of, run_limited
from support.cuda.fake_cuda import FakeGpu, FakeRuntime, FakeStream, fake_device, noted_memory

_BENCH = Path(gpu_check.__file__).parent
_TESTS = Path(__file__).parents[1]
_PATH = os.environ.get("PYTHONPATH", "")
_BARE = os.pathsep.join([str(_TESTS / "support" / "bare"), str(_TESTS), str(_BENCH), _PATH])


class _Gpu(FakeGpu):
    """Goes wrong only when the device was probed and found well."""

    later: frozenset[str] = frozenset()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Gpu]:
    """What questions open instead of CUDA, with tiny sizes."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(cuda_memory, "HostMemory", noted_memory(ranges))
    monkeypatch.setattr(gpu_check, "FULL", gpu_check.TINY)
    made = _Gpu(host_ranges=ranges)
    with ExitStack() as stack:

        def open_device(kind: str) -> tuple[CudaDevice, torch.device]:
            device, _ = stack.enter_context(fake_device(made, sync=kind, wait_timeout_s=30.0))
            made.faults |= made.later
            return device, torch.device("cpu")

        monkeypatch.setattr(gpu_check, "open_device", open_device)
        yield made


def _answer(folder: Path, name: str, kind: str) -> dict[str, Any]:
    """What a question finds that is asked in this process."""
    figures = Figures(folder / f"{name} {kind}")
    gpu_check.run_question(name, kind, 60.0, figures)
    return {name: {kind: {"status": "answered", "figures": figures.values}}}


def _asked() -> list[tuple[str, str]]:
    return [(question.name, kind) for question in QUESTIONS for kind in question.kinds]


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
        assert found["rounds"] == gpu_check.TINY.num_rounds
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
    assert run_limited(command, 1.0, tmp_path / "said", os.environ) is None
    stat = Path(f"/proc/{int(note.read_text())}/stat")
    deadline_s = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_process_that_fails_leaves_its_words_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[-1]).write_text('{\"queues\": %s}' % os.environ['QUEUES'])\n"
        "sys.exit('the context is poisoned')\n"
    )
    monkeypatch.setattr(gpu_check, "_SCRIPT", script)
    answer = ask("order", "stream", 30.0, {"QUEUES": "8"})
    assert answer["status"] == "failed" and answer["figures"] == {"queues": 8}
    assert answer["error"] == "the context is poisoned"


def _run(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(_BENCH / "gpu_check.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_the_control_flow_runs_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    code, record = _run("--device", "cpu", "--questions", "order", "--out", str(out))
    assert code == 0, record
    assert json.loads(out.read_text()) == record
    assert record["note"] == gpu_check.NOTE_CPU
    assert record["machine"]["torch"] == torch.__version__
    assert list(record["answers"]) == ["order"] and "decision" not in record
    assert faults_of(record["answers"], "cpu") == ["memory: not asked"]


def test_a_bare_machine_is_told_that_there_is_no_gpu() -> None:
    code, record = _run(CUDA_VISIBLE_DEVICES="", PYTHONPATH=_BARE)
    assert code == 0
    assert record["status"] == "skipped" and record["skipped"] == gpu_check.NO_GPU
    assert record["answers"] == {} and "decision" not in record


def test_a_bare_machine_has_all_that_questions_need() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.bare.machine"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": _BARE},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["numba"] is False
    assert found["rounds"] == gpu_check.TINY.num_rounds
