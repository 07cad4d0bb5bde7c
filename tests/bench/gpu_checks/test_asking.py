"""Questions in processes of their own: limits, failures, figures that are there after each."""

import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
from gpu_checks import asking, session
from gpu_checks.asking import ask, run_limited
from gpu_checks.figures import Figures, percentiles, read_figures

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


def test_what_does_not_fit_into_the_total_time_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "begin_report", lambda *_, **__: {})
    assert not session.Session("cpu", total_s=1.0).run(["2"], out=None, importable="installed")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["status"] == "incomplete"
    assert report["questions"]["2"]["status"] == "timed-out"
    assert "was not measured" in report["questions"]["2"]["verdict"]


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
