"""SIGINT and SIGTERM to all processes of a command, at any moment, show no traceback."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from support.serving import wait_until

_TIMEOUT_S = 60.0
_PLAN = "plan --profile a40-llama7b --workload S1 --slo-ttft-s 8 --rps 10 --jobs 2".split()
_SERVE = ("serve", "--device", "cpu", "--port", "0")
_CLUSTER = ("cluster", "--engines", "1", "--device", "cpu", "--port", "0", "--cluster-port", "0")
_PROFILE = ("profile", "--device", "cpu")


def _imports(process: psutil.Process) -> bool:
    """Whether the command has set its signal handlers: before, Python itself is starting."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            has_begun = process.cpu_times().user > 0.0
            return has_begun and not int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1
    raise AssertionError("a process has a status")


def _has(number: int) -> Callable[[psutil.Process], bool]:
    return lambda process: len(process.children(recursive=True)) >= number


_MOMENTS = {
    "profile imports": (_PROFILE, _imports, 0.0),
    "serve imports": (_SERVE, _imports, 0.0),
    "serve has an engine": (_SERVE, _has(1), 0.0),
    "serve loads the model": (_SERVE, _has(1), 1.5),
    "plan starts processes": (_PLAN, _has(2), 0.0),
    "plan simulates": (_PLAN, _has(2), 1.5),
    "cluster has a controller": (_CLUSTER, _has(1), 0.0),
    "cluster has an agent": (_CLUSTER, _has(2), 0.0),
    "cluster has an engine": (_CLUSTER, _has(3), 0.1),
    "cluster has a gateway": (_CLUSTER, _has(5), 0.0),
}
# The second signal is for full runs where the first one ends the same kind of process.
_ALWAYS = {
    signal.SIGINT: set(_MOMENTS)
    - {"serve loads the model", "plan simulates", "cluster has an agent", "cluster has a gateway"},
    signal.SIGTERM: {"serve has an engine", "plan starts processes", "cluster has an engine"},
}


@pytest.mark.parametrize(
    ("command", "moment", "after_s", "number"),
    [
        pytest.param(
            *when, number, id=f"{name}-{number.name}", marks=() if name in always else pytest.mark.full
        )
        for number, always in _ALWAYS.items()
        for name, when in _MOMENTS.items()
    ],
)
def test_all_processes_end_without_a_word(
    command: Sequence[str],
    moment: Callable[[psutil.Process], bool],
    after_s: float,
    number: signal.Signals,
    tmp_path: Path,
) -> None:
    errors = tmp_path / "errors"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            # Jobs in the background of a script ignore SIGINT, and so does what they start.
            ["env", "--default-signal", sys.executable, "-m", "corun.runtime.cli", *command],
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        root = psutil.Process(process.pid)
        wait_until(lambda: moment(root), _TIMEOUT_S)
        time.sleep(after_s)
        everybody = [*root.children(recursive=True), root]
        for one in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):  # a short-lived child
                one.send_signal(number)
        assert process.wait(_TIMEOUT_S) in (0, 128 + number, -number), errors.read_text()
        _, alive = psutil.wait_procs(everybody, timeout=_TIMEOUT_S)
        assert not alive
    finally:
        process.kill()
        process.wait()
    text = errors.read_text()
    assert not any(word in text for word in ("Traceback", "Exception", "ERROR")), text
