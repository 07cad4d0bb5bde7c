"""``corun env`` prints the facts for a bug report."""

import subprocess
import sys
from pathlib import Path

import torch


def test_env_shows_versions_devices_and_limits() -> None:
    script = Path(sys.executable).with_name("corun")
    done = subprocess.run([script, "env"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(":", 1) for line in done.stdout.splitlines())
    for name in ("corun", "python", "torch", "transformers", "triton", "numba"):
        assert facts[name].strip()
    for name in ("cpu", "cpu features", "cpus", "memory", "memory limit", "/dev/shm"):
        assert facts[name].strip()
    assert "numba threading" in facts
    assert any(name.startswith("cuda device") for name in facts)
    assert facts["torch built for cuda"].strip() == (torch.version.cuda or "no")
