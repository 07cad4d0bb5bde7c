"""One run of ``gpu_kernels``: group after group, each in a process of its own."""

import time
from pathlib import Path
from typing import Any

from gpu_checks.asking import ask, begin_report, end_report
from gpu_checks.importable import ROOT

_SCRIPT = ROOT / "bench" / "gpu_kernels.py"
GROUPS = ("attention decode", "attention prefill", "LoRA decode", "LoRA prefill")


class KernelSession:
    """Measures for ``total_s`` from now on."""

    def __init__(self, device: str, *, total_s: float, commit: str | None = None) -> None:
        self._device = device
        self._start_s = time.monotonic()
        self._deadline_s = self._start_s + total_s
        self._commit = commit

    def run(self, wanted: list[str], *, out: Path | None, importable: str) -> bool:
        """Measure the groups wanted; the JSON line comes last, and ``out`` gets a copy.

        Returns False if a row is wrong, or a group did not come to its end.
        """
        report = begin_report(
            "gpu_kernels", self._device, commit=self._commit, importable=importable
        )
        report |= {"groups": {}, "rows": [], "pass": None}
        if "status" not in report:
            self._measure([name for name in GROUPS if name in wanted], report)
        is_answered = end_report(report, time.monotonic() - self._start_s, out)
        return is_answered and report["pass"] is not False

    def _measure(self, names: list[str], report: dict[str, Any]) -> None:
        kind = "cpu" if self._device == "cpu" else "cuda"
        for position, name in enumerate(names):
            left_s = self._deadline_s - time.monotonic()
            answer = ask(_SCRIPT, name, kind, left_s / (len(names) - position))
            group = answer.to_json()
            report["rows"] += group["figures"].pop("rows", [])
            report["groups"][name] = group
        rows, groups = report["rows"], report["groups"].values()
        report["pass"] = all(row["pass"] for row in rows) if rows else None
        are_whole = all(g["status"] == "answered" and not g["figures"]["left_out"] for g in groups)
        report["status"] = "answered" if are_whole else "incomplete"
