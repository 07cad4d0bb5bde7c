"""``corun serve`` as users run it: the console script in a process of its own."""

import contextlib
import os
import re
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from .processes import running_below

START_TIMEOUT_S = 100.0
ANSWER_TIMEOUT_S = 60.0
_URL = re.compile(r"serving .* at (http://\S+)/v1$")
_SAMPLE = re.compile(r"^(\S+?)(\{.*\})? (\S+)$", re.MULTILINE)


def corun_command(*arguments: str) -> list[str]:
    """The command line of the installed console script."""
    return [str(Path(sysconfig.get_path("scripts")) / "corun"), *arguments]


class Served:
    """A server that is ready, and the processes it consists of. Closing it leaves none."""

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, command: Sequence[str] = ()
    ) -> None:
        """``command``: what to run in place of the console script."""
        self.log_lines: list[str] = []
        self.process = subprocess.Popen(
            [*(command or corun_command()), "serve", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | dict(environment or {}),
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.url = ""
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        children = psutil.Process(self.process.pid).children(recursive=True)
        (self.engine,) = running_below("corun.runtime.engine.process", self.process.pid, recursive=True)
        self.processes = [psutil.Process(self.process.pid), *children]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs of it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def client(self, timeout_s: float = ANSWER_TIMEOUT_S) -> httpx.Client:
        """A client for paths that begin with ``/v1`` or name another endpoint."""
        return httpx.Client(base_url=self.url, timeout=timeout_s)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Send one request and return the answer, of any status."""
        return httpx.post(self.url + path, json=body, timeout=ANSWER_TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        """The samples of ``/metrics`` by name, summed over labels."""
        samples: dict[str, float] = {}
        text = httpx.get(self.url + "/metrics", timeout=ANSWER_TIMEOUT_S).text
        for name, _, value in _SAMPLE.findall(text):
            samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def cpu_seconds(self) -> float:
        """Processor time that its processes have used, by the scheduler's own count."""
        total_ns = 0
        for process in self.processes:
            for thread in Path("/proc").glob(f"{process.pid}/task/*/schedstat"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    total_ns += int(thread.read_text().split()[0])
        return total_ns * 1e-9

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log_lines.append(line.rstrip())
            found = _URL.search(line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def _wait_ready(self) -> None:
        assert self._ready.wait(START_TIMEOUT_S), "\n".join(self.log_lines)
        assert self.url, "\n".join(self.log_lines)


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Poll until ``condition`` holds; fail if it never does."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not true within {timeout_s} s"
        time.sleep(0.02)
