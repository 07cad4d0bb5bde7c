"""Parts of Ray fail under load, once each, with the bounds of ``bench/ray_faults.py``.

Times to first token are not tested: they need a quiet machine, so the benchmark has them.
"""

import os
import shutil

import pytest
from ray_faults import BOUNDS, CONTROL, exceeded_by, run_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("default"),  # Ray's are not ours
]
_WITH_REDIS = ("control-store-kill", "head-kill-redis")


@pytest.mark.parametrize("fault", [fault for fault in BOUNDS if fault != CONTROL])
def test_only_streams_of_what_died_are_cut(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "partition" and (os.geteuid() != 0 or shutil.which("ip") is None):
        pytest.skip("network namespaces need root, and ip of iproute2")
    if fault in _WITH_REDIS and shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    for name, value in os.environ.items():  # run_of sets variables for all processes of Ray
        monkeypatch.setenv(name, value)
    figures = run_of(fault)
    assert [text for text in exceeded_by(fault, figures) if "p99" not in text] == []
