"""One run of ``gpu_check``: question after question, each with a verdict from its figures."""

import time
from pathlib import Path
from typing import Any

from gpu_checks.asking import ask, begin_report, end_report
from gpu_checks.importable import ROOT
from gpu_checks.questions import QUESTIONS, Question
from gpu_checks.verdicts import verdict_of

_SCRIPT = ROOT / "bench" / "gpu_check.py"
_WORST_FIRST = ("failed", "timed-out", "answered")


class Session:
    """Asks for ``total_s`` from now on."""

    def __init__(self, device: str, *, total_s: float, commit: str | None = None) -> None:
        self._device = device
        self._start_s = time.monotonic()
        self._deadline_s = self._start_s + total_s
        self._commit = commit

    def run(self, wanted: list[str], *, out: Path | None, importable: str) -> bool:
        """Ask, print progress, and print the JSON line last; ``out`` gets a copy.

        Returns False if a question that could be asked was not answered.
        """
        report = begin_report("gpu_check", self._device, commit=self._commit, importable=importable)
        report["questions"] = {}
        if "status" not in report:
            asked = [q for q in QUESTIONS if q.name in wanted]
            report["questions"] = {q.name: self._answer(q) for q in asked}
            statuses = {answer["status"] for answer in report["questions"].values()}
            report["status"] = "answered" if statuses <= {"answered", "skipped"} else "incomplete"
        return end_report(report, time.monotonic() - self._start_s, out)

    def _answer(self, question: Question) -> dict[str, Any]:
        """Ask for every kind and put the answers together."""
        print(f"{question.name}: {question.title}", flush=True)
        if self._device == "cpu" and question.why_not_on_cpu is not None:
            reason = f"skipped: {question.why_not_on_cpu}"
            return {"title": question.title, "status": "skipped", "verdict": reason, "by": {}}
        kinds = ("cpu",) if self._device == "cpu" else question.kinds
        answers = {}
        for position, kind in enumerate(kinds):
            left_s = self._deadline_s - time.monotonic()
            # What is left is shared by the kinds that are still to come.
            limit_s = min(question.limit_s, left_s / (len(kinds) - position))
            answers[kind] = ask(_SCRIPT, question.name, kind, limit_s)
        figures = {kind: answer.figures for kind, answer in answers.items()}
        statuses = {kind: answer.status for kind, answer in answers.items()}
        verdict = verdict_of(question.name, figures, statuses)
        print(f"  {verdict}", flush=True)
        return {
            "title": question.title,
            "status": next(s for s in _WORST_FIRST if s in statuses.values()),
            "verdict": verdict,
            "by": {kind: answer.to_json() for kind, answer in answers.items()},
        }
