"""Tries classes one after the other in processes with limits of time and memory."""

import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from ...cpu_workers.affinity import limit_torch_threads
from .outcome import Parity, Trial

_MAX_S = 300  # of a trial
_MAX_BYTES = 12 * 2**30  # of memory that a process has to itself
_MAX_TRIALS = 16  # of a process; its start takes longer than a trial
_END_S = 10.0


def try_in_processes(model_types: Iterable[str]) -> Iterator[Trial]:
    """Yield the result for each type as soon as it is known.

    After a failure, the type is tried again in a new process, as earlier types may be its cause.
    """
    process: _Process | None = None
    try:
        for model_type in model_types:
            process = _with_room(process)
            trial = process.run(model_type)
            if trial.has_failed and process.num_trials > 1:
                process.close()
                process = _Process()
                trial = process.run(model_type)
            yield trial
            if trial.has_failed:
                process.num_trials = _MAX_TRIALS
    finally:
        if process is not None:
            process.close()


class _Process:
    """A process for some trials. ``close`` it in the end."""

    def __init__(self) -> None:
        self.num_trials = 0
        context = multiprocessing.get_context("spawn")
        self._trials, theirs = context.Pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="corun-models-")
        self._process = context.Process(target=_run, args=(theirs, Path(self._directory.name)))
        self._process.start()
        theirs.close()

    def run(self, model_type: str) -> Trial:
        self.num_trials += 1
        try:
            self._trials.send(model_type)
            if not self._trials.poll(_MAX_S):
                return _failed(model_type, f"there is no result after {_MAX_S} s")
            trial = self._trials.recv()
        except (EOFError, OSError):
            self._process.join(_END_S)
            return _failed(model_type, f"the process ended with exit code {self._process.exitcode}")
        assert isinstance(trial, Trial)
        return trial

    def close(self) -> None:
        """End the process and remove its files."""
        self._trials.close()
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()
        self._directory.cleanup()


def _with_room(process: _Process | None) -> _Process:
    """``process``, or a new one if it has tried enough types."""
    if process is not None and process.num_trials < _MAX_TRIALS:
        return process
    if process is not None:
        process.close()
    return _Process()


def _failed(model_type: str, reason: str) -> Trial:
    return Trial(model_type, "").ended(Parity.FAILED, reason)


def _run(trials: Connection, directory: Path) -> None:
    """Try each type that arrives, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the other end then closes
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries print
        os.dup2(silent, stream)
    from ..engine.assembly.placement import STATE_VARIABLE
    from .trial import try_model

    os.environ[STATE_VARIABLE] = str(directory / "state")  # what a start keeps for the next one
    limit_torch_threads()
    while True:
        try:
            model_type = trials.recv()
        except EOFError:
            return
        signal.alarm(2 * _MAX_S)  # ends the process if its parent has ended
        with tempfile.TemporaryDirectory(dir=directory) as name:
            try:
                trial = try_model(model_type, Path(name))
            except Exception as error:  # a bug here, or an error that is no refusal
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                trial = _failed(model_type, reason[:300])
        signal.alarm(0)
        trials.send(trial)
