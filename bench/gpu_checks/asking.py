"""Asks one thing in a process of its own, and writes the report of all of them.

Loads neither torch nor CUDA: whatever a question does to its process, the next one is asked.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks.figures import read_figures
from gpu_checks.importable import ROOT

NOTE_CPU = "control flow on the CPU, no figures of a GPU"
NO_GPU = "skipped: torch finds no CUDA device here"
_ERROR_LINES = 15
# A process needs this long to import and open its device; and so long to close it.
_START_S = 12.0
_GRACE_S = 5.0
_MACHINE_S = 60.0
# A killed process ends when its driver has let go of it, which pinned memory delays.
_KILLED_S = 20.0
_CHECK = ROOT / "bench" / "gpu_check.py"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process left."""

    status: str  # answered | failed | timed-out
    seconds: float
    figures: dict[str, Any]
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For the report."""
        made = {"status": self.status, "seconds": round(self.seconds, 1), "figures": self.figures}
        return made if self.error is None else {**made, "error": self.error}


def make_parser(
    description: str, parts: str, parts_help: str, total_s: float
) -> argparse.ArgumentParser:
    """The options of a script that asks part by part, and those that ``ask`` calls it with.

    ``parts`` is what its parts are called; which ones are wanted is the option of that name.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON line")
    parser.add_argument(f"--{parts}", default="", dest="wanted", help=parts_help)
    parser.add_argument("--total-s", type=float, default=total_s, help="limit for all together")
    parser.add_argument("--commit", help="for the report, where the tree has no git")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    return parser


def choose(parser: argparse.ArgumentParser, text: str, known: Sequence[str]) -> list[str]:
    """The names in ``text``, by commas; all that are known if there are none. Ends for others."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            parser.error(f"no {name!r}; choose from: {', '.join(known)}")
    return wanted or list(known)


def ask(script: Path, name: str, kind: str, limit_s: float) -> Answer:
    """Run ``script`` for one question and one kind, for ``limit_s`` at most."""
    print(f"{name} ({kind}), {limit_s:.0f} s at most", flush=True)
    if limit_s < _START_S:
        return Answer("timed-out", 0.0, {}, "the total time was over before it could be asked")
    with tempfile.TemporaryDirectory(prefix="corun-gpu-check-") as folder:
        path = Path(folder) / "figures.json"
        command = [
            sys.executable, str(script), "--run", name, "--kind", kind,
            "--limit-s", str(limit_s - _GRACE_S), "--figures", str(path),
        ]  # fmt: skip
        start_s = time.monotonic()
        status, error = run_limited(command, limit_s)
        return Answer(status, time.monotonic() - start_s, read_figures(path), error)


def begin_report(
    benchmark: str, device: str, *, commit: str | None, importable: str
) -> dict[str, Any]:
    """Machine, date and commit; with a ``status`` if there is nothing to go on with."""
    machine = ask(_CHECK, "machine", "cpu" if device == "cpu" else "cuda", _MACHINE_S)
    report: dict[str, Any] = {
        "benchmark": benchmark,
        "machine": machine.figures,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or _describe_commit(),
        "imported_by": importable,
    }
    if device == "cpu":
        report["note"] = NOTE_CPU
    if machine.status != "answered":
        report |= {"status": machine.status, "error": machine.error}
    elif device == "cuda" and not machine.figures["has_gpu"]:
        print(NO_GPU, flush=True)
        report |= {"status": "skipped", "skipped": NO_GPU}
    return report


def end_report(report: dict[str, Any], seconds: float, out: Path | None) -> bool:
    """Print the JSON line, with a copy to ``out``; False if something was left without answer."""
    line = json.dumps(report | {"seconds": round(seconds, 1)})
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return report["status"] in {"answered", "skipped"}


def run_limited(command: list[str], limit_s: float) -> tuple[str, str | None]:
    """Run a command and everything it starts for ``limit_s`` at most: status, and what it said.

    Its output passes through; the end of its errors is kept. It is killed with its process group,
    also if it ends by itself and leaves somebody behind.
    """
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    kept: deque[str] = deque(maxlen=_ERROR_LINES)
    reader = threading.Thread(target=_read, args=(process, kept), daemon=True)
    reader.start()
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
    finally:
        _kill(process, kept)
        reader.join(5.0)
    said = "".join(kept).strip()
    if code is None:
        return "timed-out", f"killed after {limit_s:.0f} s: {said}"
    return ("answered", None) if code == 0 else ("failed", f"exit code {code}: {said}")


def _kill(process: "subprocess.Popen[str]", kept: "deque[str]") -> None:
    """End the process group, and go on if it does not end: others are still to be asked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_KILLED_S)
    except subprocess.TimeoutExpired:
        kept.append(f"process {process.pid} is still there {_KILLED_S:.0f} s after SIGKILL")


def _read(process: "subprocess.Popen[str]", kept: "deque[str]") -> None:
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            sys.stderr.write(line)
            kept.append(line)


def _describe_commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
