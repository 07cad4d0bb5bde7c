"""The measurement of GPU kernels: its control flow on the CPU, its floors, and wrong kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.attention.torch_backend import TorchAttention
from corun.gpu.lora.table import LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from gpu_checks import kernel_session
from gpu_checks.asking import NOTE_CPU
from gpu_checks.attention_rows import TINY, measure_attention
from gpu_checks.figures import Figures
from gpu_checks.importable import ROOT
from gpu_checks.kernel_groups import run_group
from gpu_checks.kernel_session import GROUPS, KernelSession
from gpu_checks.kernel_timing import Measured, Times, make_row
from gpu_checks.lora_rows import LoraShape, Segment, measure_lora

_CPU = torch.device("cpu")


def _run(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu_kernels.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


_MEASURED_APART = "LoRA prefill"


def test_a_group_runs_on_the_cpu_of_a_bare_machine(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    code, report = _run(
        "--device", "cpu", "--groups", _MEASURED_APART, "--out", str(out),
        PYTHONPATH=str(ROOT / "tests" / "support" / "bare"),
    )  # fmt: skip
    assert code == 0, report
    assert json.loads(out.read_text()) == report
    assert report["note"] == NOTE_CPU
    assert report["status"] == "answered" and report["pass"] is True
    assert {row["kernel"] for row in report["rows"]} == {_MEASURED_APART}


@pytest.mark.parametrize("name", [name for name in GROUPS if name != _MEASURED_APART])
def test_the_other_groups_run_on_the_cpu(name: str, tmp_path: Path) -> None:
    figures = Figures(tmp_path / "figures")
    run_group(name, "cpu", 60.0, figures)
    assert figures.values["left_out"] == []
    assert figures.values["rows"]
    for row in figures.values["rows"]:
        assert row["kernel"] == name
        assert row["pass"] is True
        assert "us" not in row, "times of the CPU are no figures of a GPU"


def test_rows_that_the_time_does_not_allow_are_named(tmp_path: Path) -> None:
    figures = Figures(tmp_path / "figures")
    run_group("LoRA decode", "cpu", -1.0, figures)
    assert [setting["batch"] for setting in figures.values["left_out"]] == [1, 3]


def test_says_that_it_skipped_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_session, "begin_report", lambda *_, **__: {"status": "skipped"})
    assert KernelSession("cuda", total_s=60.0).run([*GROUPS], out=None, importable="installed")
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "skipped" and report["pass"] is None
    assert report["rows"] == []


def test_a_row_has_the_share_of_its_floor() -> None:
    times = Times(device_us=40.0, eager_us=55.0)
    by_memory = Measured(0.5, 9.0, num_bytes=20_000_000, num_flops=10**9, times=times)
    row = make_row("k", {"batch": 1}, by_memory, copy_gb_per_s=1000.0, matrix_tflops=500.0)
    assert (row["floor_us"], row["bound_by"], row["share_of_floor"]) == (20.0, "memory", 0.5)
    assert row["pass"] and row["batch"] == 1
    by_matrix = Measured(0.5, 9.0, num_bytes=1000, num_flops=15 * 10**9, times=times)
    row = make_row("k", {}, by_matrix, copy_gb_per_s=1000.0, matrix_tflops=500.0)
    assert (row["floor_us"], row["bound_by"], row["share_of_floor"]) == (30.0, "matrix", 0.75)


@pytest.mark.parametrize(("error", "control"), [(1.1, 9.0), (float("inf"), 9.0), (0.5, 0.9)])
def test_a_row_fails_for_an_error_and_for_a_comparison_that_sees_nothing(
    error: float, control: float
) -> None:
    measured = Measured(error, control, 1, 1, Times(None, None))
    row = make_row("k", {}, measured, copy_gb_per_s=None, matrix_tflops=None)
    assert row["pass"] is False
    assert "share_of_floor" not in row
    assert "Infinity" not in json.dumps(row)


class _WrongAttention(TorchAttention):
    def __init__(self, wrong: float) -> None:
        self._wrong = wrong

    def forward(self, *arguments: Any) -> torch.Tensor:
        attended = super().forward(*arguments).clone()
        attended[-1, -1, -1] = self._wrong
        return attended


@pytest.mark.parametrize("rows", [[(1, 40), (1, 40)], [(7, 19)]])
def test_one_wrong_value_of_attention_is_seen(rows: list[tuple[int, int]]) -> None:
    right = measure_attention(TorchAttention(), TINY, rows, _CPU)
    assert right.error <= 1.0 < right.control
    for wrong in (4.0, torch.nan):
        assert measure_attention(_WrongAttention(wrong), TINY, rows, _CPU).error > 1.0


class _WrongLora(TorchLora):
    def add_delta(self, x: torch.Tensor, y: torch.Tensor, target_index: int, batch: Any) -> None:
        super().add_delta(x, y, target_index, batch)
        y[0, 0] += 1.0


def test_one_wrong_value_of_lora_is_seen() -> None:
    shape, segments = LoraShape(64, 48, min_weight_bytes=1), [Segment(3, 8), Segment(1, 5)]

    def measure(kind: type[TorchLora]) -> Measured:
        def make(table: LoraTable) -> TorchLora:
            return kind(table, dtype=torch.bfloat16)

        return measure_lora(make, shape, segments, _CPU)

    right = measure(TorchLora)
    assert right.error <= 1.0 < right.control
    assert measure(_WrongLora).error > 1.0
