"""Policies get their inputs as arguments; they call no mechanism."""

import os
import subprocess
import sys


def test_cold_requests_are_planned_and_simulated_where_there_is_no_mechanism() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from support.policies_alone import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
