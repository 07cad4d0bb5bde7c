"""The questions to a GPU: control flow on the CPU device, limits, and verdicts from figures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_checks import importable, layout
from gpu_checks.asking import NOTE_CPU
from gpu_checks.figures import read_figures
from gpu_checks.questions import QUESTIONS, run_question
from gpu_checks.verdicts import verdict_of
from support.triton_program import run_triton_program

_SCRIPT = importable.ROOT / "bench" / "gpu_check.py"
_TESTS = importable.ROOT / "tests"
_BARE = str(_TESTS / "support" / "bare")


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


def test_the_kernel_counts_wrong_words_in_the_interpreter() -> None:
    found = json.loads(run_triton_program("triton_count_words", TRITON_INTERPRET="1"))
    assert found == {"tensor": 3, "address": 3, "volatile": 3}
