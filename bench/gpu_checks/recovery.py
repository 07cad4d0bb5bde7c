"""Question 6: does the waiter recover when its peer dies or stops, and is anything left behind?

A supervisor process without CUDA owns the worker. When the worker has ended, or its heart stands
still, it reaps the worker and only then stores what the stream waits for.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpu_checks import layout
from gpu_checks.figures import Figures
from gpu_checks.importable import ROOT
from gpu_checks.rig import Rig, use_rig

_DEADLINE_S = 0.25  # of the supervisor, for a heart that stands still
_GONE_S = 10.0


def recovery(kind: str, limit_s: float, figures: Figures) -> None:
    """A killed worker, a stopped one, no supervisor at all, and a killed waiter."""
    names_before = _own_names()
    use_rig(kind, limit_s, lambda rig: _recovery_with(rig, figures))
    figures.put("segments_left", sorted(_own_names() - names_before))


def _recovery_with(rig: Rig, figures: Figures) -> None:
    figures.put("supervisor_deadline_s", _DEADLINE_S)
    num_fds = len(os.listdir("/proc/self/fd"))
    figures.put("worker killed", _lose_worker(rig, signal.SIGKILL))
    figures.put("worker stopped", _lose_worker(rig, signal.SIGSTOP))
    figures.put("released by the waiter itself", _release(rig))
    figures.put("waiter killed", _kill_waiter(rig))
    figures.put("descriptors_left", len(os.listdir("/proc/self/fd")) - num_fds)


def _own_names() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("corun*")} if folder.is_dir() else set()


def _lose_worker(rig: Rig, number: signal.Signals) -> dict[str, Any]:
    """Let a worker take a job, strike it down, and wait for the stream."""
    values = rig.zeros(1024)
    # Once before anything waits: the first launch of a kernel may hang behind a wait.
    rig.launch(rig.transfer, lambda: values.add_(0))
    rig.synchronize(rig.transfer)
    supervisor = rig.start_peer("supervise", deadline_s=_DEADLINE_S, words="polled")
    rig.device.signal(rig.transfer, rig.word(layout.READY), 1)
    rig.device.wait(rig.transfer, rig.word(layout.DONE), 1)
    rig.launch(rig.transfer, lambda: values.add_(3))
    rig.until(lambda: rig.load(layout.HEARTBEAT) > 0, "the job", 25.0, supervisor)
    pid = rig.load(layout.PEER_PID)
    was_held = rig.load(layout.DONE) == 0
    os.kill(pid, number)
    start_s = time.perf_counter()
    rig.synchronize(rig.transfer)
    took_s = time.perf_counter() - start_s
    exit_code = supervisor.wait(_GONE_S)
    states = {layout.RELEASED_DEAD: "found dead", layout.RELEASED_HUNG: "found hung, then killed"}
    return {
        "was_held": was_held,
        "recovered_ms": round(took_s * 1e3, 2),
        "supervisor_says": states.get(rig.load(layout.STATE), "nothing"),
        "supervisor_exit_code": exit_code,
        "worker_is_gone": _is_gone(pid),
        "device_computes": bool((values == 3).all()),
    }


def _release(rig: Rig) -> dict[str, Any]:
    """Nobody answers; the device's own release ends the wait."""
    rig.store(layout.DONE, 0)
    rig.device.wait(rig.transfer, rig.word(layout.DONE), 1)
    start_s = time.perf_counter()
    num_words = rig.device.release_waits()
    rig.synchronize(rig.transfer)
    return {"words": num_words, "ms": round((time.perf_counter() - start_s) * 1e3, 2)}


def hold(kind: str, limit_s: float, figures: Figures) -> None:
    """The victim of ``_kill_waiter``: hold a stream, say who belongs to it, and stay."""
    use_rig(kind, limit_s, lambda rig: _hold_with(rig, figures))


def _hold_with(rig: Rig, figures: Figures) -> None:
    supervisor = rig.start_peer("supervise", deadline_s=_DEADLINE_S, words="polled")
    rig.device.signal(rig.transfer, rig.word(layout.READY), 1)
    rig.device.wait(rig.transfer, rig.word(layout.DONE), 1)
    rig.until(lambda: rig.load(layout.HEARTBEAT) > 0, "the job", 25.0, supervisor)
    figures.put("pids", [supervisor.pid, rig.load(layout.PEER_PID)])
    time.sleep(rig.left_s())


def _kill_waiter(rig: Rig) -> dict[str, Any]:
    """SIGKILL a process that holds a stream of the same device; who and what goes with it?"""
    free_before = 0 if rig.is_tiny else torch.cuda.mem_get_info()[0]
    with tempfile.TemporaryDirectory() as folder:
        victim = subprocess.Popen(
            [
                sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--run", "hold",
                "--kind", rig.kind, "--limit-s", "60", "--figures", str(Path(folder) / "figures"),
            ],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            pids = _read_pids(victim)
        finally:
            victim.kill()
            victim.wait()
    start_s = time.perf_counter()
    rig.until(lambda: all(_is_gone(pid) for pid in pids), "the end of its processes", _GONE_S)
    gone_s = time.perf_counter() - start_s
    found: dict[str, Any] = {"processes_gone_ms": round(gone_s * 1e3, 1), "processes": len(pids)}
    values = rig.zeros(16)
    rig.launch(rig.compute, lambda: values.add_(1))
    rig.synchronize(rig.compute)
    found["device_computes"] = bool((values == 1).all())
    if not rig.is_tiny:
        rig.until(
            lambda: torch.cuda.mem_get_info()[0] >= free_before - (64 << 20),
            "the return of its device memory", _GONE_S,
        )  # fmt: skip
        found["device_memory_back_ms"] = round((time.perf_counter() - start_s) * 1e3, 1)
    return found


def _read_pids(victim: "subprocess.Popen[bytes]") -> list[int]:
    assert victim.stdout is not None
    with victim.stdout as lines:
        for line in lines:
            name, _, value = line.decode().strip().partition(": ")
            if name == "pids":
                pids: list[int] = json.loads(value)
                return pids
    raise RuntimeError("the waiter ended before it held a stream")


def _is_gone(pid: int) -> bool:
    """Whether the process has ended; nobody may have reaped it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in {"Z", "X"}
