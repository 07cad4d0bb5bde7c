"""Asks the questions, and keeps their answers in one file that a later call continues."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runtime.config.environment import MAX_CONNECTIONS
from ...runtime.errors import ConfigError
from ...runtime.whole_file import write_whole
from .questions import BOTH, GRACE_S, MACHINE, PROGRAM, QUESTIONS, Question, rounded

NOTE_CPU = "control flow on the CPU, no figures of a GPU"
NO_GPU = "torch finds no CUDA device here, so there is nothing to check (corun env says more)"

_FORMAT = "corun.gpu.check 1"
_KILLED_S = 20.0  # a killed process ends when its driver has let go of it
_ERROR_LINES = 60  # a traceback through torch and Triton
# A path of this machine but for its last folder and its name; not that of a URL.
_FOLDERS = re.compile(r"(?<![\w:/])(?:/[^/\s\"',:()]+)+(?=/[^/\s\"',:()]+/[^/\s\"',:()]+)")
_QUOTED_FOLDERS = re.compile(r"(?<=File \")/[^\"\n]*(?=/[^/\"\n]+/[^/\"\n]+\")")


class GpuReport:
    """The answers so far, in a file that is whole at any time."""

    def __init__(self, path: Path, device: str, machine: Mapping[str, Any]) -> None:
        """Continue the report at ``path``, or begin it.

        ``machine``: what this machine is.

        Raises ``ConfigError`` if the file is no report, or is one of another machine.
        """
        self._path = path
        self.values: dict[str, Any] = {
            "format": _FORMAT,
            "date": time.strftime("%Y-%m-%d"),
            **({"note": NOTE_CPU} if device == "cpu" else {}),
            "machine": dict(machine),
            "answers": {},
        }
        if path.exists():
            self.values["answers"] = self._earlier(self.values)["answers"]

    def _earlier(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """What the file holds."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            is_report = found["format"] == _FORMAT and all(
                isinstance(found[name], dict) for name in ("answers", "machine")
            )
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"--report {self._path}: not a report of this program ({error})") from error
        if not is_report:
            raise ConfigError(f"--report {self._path}: not a report of this program's version")
        now, then = ({"note": one.get("note"), **one["machine"]} for one in (wanted, found))
        changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        if changed:
            described = ", ".join(f"{name} ({then.get(name)} then, {now.get(name)} now)" for name in changed)
            raise ConfigError(
                f"--report {self._path}: begun on another machine or with other versions: {described}; "
                "name another file"
            )
        return dict(found)

    def has_answer(self, name: str, kind: str) -> bool:
        """Whether nothing is left to ask; what has failed is asked again."""
        answer = self.values["answers"].get(name, {}).get(kind, {})
        return bool(answer.get("status") == "answered")

    def expect(self, asked: Sequence[tuple[str, str]]) -> None:
        """Note questions and kinds as not asked, if they have no answer: a call may end before them."""
        for name, kind in asked:
            self.values["answers"].setdefault(name, {}).setdefault(kind, {"status": "not asked"})
        self.save()

    def put(self, name: str, kind: str, answer: Mapping[str, Any]) -> None:
        self.values["answers"].setdefault(name, {})[kind] = answer
        self.save()

    def save(self) -> None:
        """Write what there is, with what follows from it."""
        answers = self.values["answers"]
        if "note" not in self.values:
            self.values["decision"] = decide(answers)
        statuses = {answer["status"] for by in answers.values() for answer in by.values()}
        self.values["status"] = "answered" if statuses <= {"answered"} else "incomplete"
        write_whole(self._path, (json.dumps(self.values, indent=1) + "\n").encode())


def find_machine(device: str) -> Mapping[str, Any]:
    """What this machine is. Raises ``ConfigError`` if it lacks the device, or cannot be asked."""
    found = ask(MACHINE, "cpu")
    if found["status"] != "answered":
        raise ConfigError(f"torch does not work on this machine: {found['error']}")
    machine: Mapping[str, Any] = found["figures"]
    if device == "cuda" and not machine["has_gpu"]:
        raise ConfigError(NO_GPU)
    return machine


def answer_all(report: GpuReport, device: str, wanted: Sequence[str]) -> None:
    """Ask what is wanted and has no answer yet."""
    asked = [
        (question, kind)
        for question in QUESTIONS
        if question.name in wanted
        for kind in (question.kinds if device == "cuda" else ("cpu",))
    ]
    print(f"machine: {json.dumps(report.values['machine'])}", flush=True)
    report.expect([(question.name, kind) for question, kind in asked])
    for number, (question, kind) in enumerate(asked, 1):
        if report.has_answer(question.name, kind):
            print(f"[{number} of {len(asked)}] {question.name} ({kind}): answered earlier", flush=True)
            continue
        minutes = sum(later.limit_s for later, _ in asked[number - 1 :]) / 60
        print(
            f"[{number} of {len(asked)}] {question.name} ({kind}), {question.limit_s:.0f} s at most; "
            f"from here to the end {minutes:.0f} min at most",
            flush=True,
        )
        report.put(question.name, kind, ask(question, kind))


def ask(question: Question, kind: str) -> dict[str, Any]:
    """Run a question in a process of its own, for its limit and some grace at most."""
    with tempfile.TemporaryDirectory(prefix="corun-gpu-check-") as folder:
        path, said = Path(folder, "figures.json"), Path(folder, "stderr")
        names = ["--run", question.name, "--kind", kind, "--limit-s", str(question.limit_s)]
        command = [*PROGRAM, *names, "--figures", str(path)]
        start_s = time.monotonic()
        environment = {**os.environ, **question.environment}
        code = run_limited(command, question.limit_s + GRACE_S, said, environment)
        answer = {
            "status": {None: "timed-out", 0: "answered"}.get(code, "failed"),
            "seconds": rounded(time.monotonic() - start_s),
            "figures": json.loads(path.read_text(encoding="utf-8")) if path.exists() else {},
        }
        if answer["status"] != "answered":
            lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
            answer["error"] = without_folders("\n".join(lines[-_ERROR_LINES:]))
            print(answer["error"], file=sys.stderr)
    return answer


def run_limited(command: list[str], limit_s: float, said: Path, environment: Mapping[str, str]) -> int | None:
    """Run a command and all that it starts; its exit code, None if it had to be killed.

    What it writes to its standard error goes to the file ``said``.
    """
    with said.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, start_new_session=True, env=dict(environment))
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
    finally:  # its session of its own gets no Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its children
        with contextlib.suppress(subprocess.TimeoutExpired):  # other questions follow
            process.wait(_KILLED_S)
    return code


def without_folders(text: str) -> str:
    """``text`` with the last folder and the name of each path: the rest is the owner's."""
    return _FOLDERS.sub("...", _QUOTED_FOLDERS.sub("...", text))


def faults_of(answers: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    """Faults that exclude a way; empty if there are none. Pure.

    ``answers``: of a report, by question and kind.
    """
    faults = []
    for name in ("order",) if kind == "host" else ("memory", "order"):
        answer = answers.get(name, {}).get(kind, {"status": "not asked"})
        if answer["status"] != "answered":
            faults.append(f"{name}: {answer['status']}")
        elif "refused" in answer["figures"]:
            faults.append(f"{name}: {answer['figures']['refused']}")
        else:
            for way, found in answer["figures"]["wrong"].items():
                excess = found["words"] - found["planted"]
                if excess > 0:
                    faults.append(f"{name}: {excess} wrong words {way}")
                elif excess < 0 or found["planted"] == 0:
                    faults.append(f"{name}: the check {way} is blind")
    return faults


def decide(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The decision: the better way that works, and the fewest queues. Pure."""
    faults = {kind: faults_of(answers, kind) for kind in BOTH}
    works = [kind for kind in BOTH if not faults[kind]]
    queues = [
        question.num_queues
        for question in QUESTIONS
        if question.name.startswith("streams")
        and answers.get(question.name, {}).get("stream", {}).get("figures", {}).get("held_up") == []
    ]
    return {
        "device_sync": works[0] if works else None,
        "faults": faults,
        MAX_CONNECTIONS: queues[0] if queues else None,
    }
