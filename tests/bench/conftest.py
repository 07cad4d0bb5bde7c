"""What tests of benchmarks share."""

import pytest
from gpu_checks.importable import ROOT


@pytest.fixture
def bench_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers find this folder as they do below the script."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "bench"))
