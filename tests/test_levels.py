"""Kernels and answers on every level of instructions below this machine's, in forced processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from corun.cpu_workers.kernels.simd import isa

_ROOT = Path(__file__).parent.parent
_KERNELS = """
    tests/cpu_workers/deltas tests/cpu_workers/kernels tests/gpu/attention
    tests/gpu/execution/test_logit_inputs.py tests/gpu/fused tests/gpu/linear tests/gpu/lora
""".split()
_PARITY = ("tests/parity", "tests/e2e/test_answers.py")
_LEVELS = [level.name for level in isa.LEVELS]
_RUN_S = 1500


def _run(level: str, paths: Sequence[str]) -> None:
    if level not in [each.name for each in isa.machine_levels()]:
        pytest.skip(f"this machine cannot compute at {level}: {isa.why_not(level)}")
    command = [sys.executable, "-m", "pytest", "-q", *paths]
    # Not a part of the run that started it.
    inherited = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env=inherited | isa.forcing_environment(level),
        capture_output=True,
        text=True,
        timeout=_RUN_S,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.timeout(_RUN_S)
@pytest.mark.parametrize("paths", [_PARITY, _KERNELS], ids=["parity", "kernels"])
@pytest.mark.parametrize("level", _LEVELS)
def test_on_a_level(level: str, paths: Sequence[str]) -> None:
    _run(level, paths)
