"""A cluster as its command starts it, over a benchmark's engines, and the cores of its parts."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

KEY = "a-key-for-one-benchmark-alone"
START_TIMEOUT_S = 90.0


def cpu_halves() -> tuple[list[int], list[int]]:
    """Of the CPUs that this process may use: the gateway's, and all others'."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise SystemExit("cluster.py needs two CPUs: one for the gateway alone")
    return cpus[:1], cpus[1:]


class Cluster:
    """``corun cluster`` over engines at URLs, all with the key ``KEY``."""

    def __init__(
        self, engines: Sequence[str], *options: str, gateway_cpus: Sequence[int] | None = None
    ) -> None:
        """``gateway_cpus``: pin the gateway there, and all others elsewhere."""
        self._directory = Path(tempfile.mkdtemp())
        key_file = self._directory / "key"
        key_file.touch(0o600)
        key_file.write_text(KEY)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "corun.runtime.cli", "cluster", "--port", str(port)]
        command += ["--state-dir", str(self._directory / "state"), "--log-level", "warning"]
        command += ["--cluster-key-file", str(key_file), "--allow-runtime-lora-updating"]
        for engine in engines:
            command += ["--engine", engine]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL)
        try:
            self._wait_ready(len(engines))
        except BaseException:
            self.close()
            raise
        if gateway_cpus is not None:
            self._pin(gateway_cpus)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where its gateway listens."""
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    @property
    def gateway_cpu_s(self) -> float:
        """Processor time of its gateway so far."""
        return sum(psutil.Process(self._find("gateway")).cpu_times()[:2])

    def load(self, name: str, path: Path) -> None:
        """Load an adapter for all engines."""
        post(self.url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    def close(self) -> None:
        """End it in order. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _wait_ready(self, num_engines: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                metrics = get(self.url, "/metrics")
                ready = [line for line in metrics.splitlines() if "gateway_engine_usable{" in line]
                if sum(line.endswith((" 1", " 1.0")) for line in ready) >= num_engines:
                    return
            time.sleep(0.1)
        raise RuntimeError("the cluster does not come up")

    def _pin(self, gateway_cpus: Sequence[int]) -> None:
        others = sorted(os.sched_getaffinity(0) - set(gateway_cpus))
        gateway = self._find("gateway")
        for child in psutil.Process(self._process.pid).children(recursive=True):
            for thread in child.threads():
                cpus = gateway_cpus if child.pid == gateway else others
                os.sched_setaffinity(thread.id, cpus)

    def _find(self, name: str) -> int:
        for child in psutil.Process(self._process.pid).children(recursive=True):
            if f"corun.runtime.cluster.{name}" in child.cmdline():
                return child.pid
        raise RuntimeError(f"the cluster has no {name}")


def post(url: str, path: str, body: dict[str, object]) -> bytes:
    """Send one request and return the answer."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        data: bytes = answer.read()
    return data


def get(url: str, path: str) -> str:
    """Return the answer to one request."""
    with urllib.request.urlopen(url + path, timeout=10) as answer:  # noqa: S310
        data: bytes = answer.read()
    return data.decode()


@contextlib.contextmanager
def plain_engines(number: int, cpus: Sequence[int], step_s: float) -> Iterator[list[str]]:
    """URLs of engines that answer at once, and then once in ``step_s``: see ``plain_engine.py``."""
    script = Path(__file__).with_name("plain_engine.py")
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(number):
            process = stack.enter_context(
                subprocess.Popen([sys.executable, str(script), str(step_s)], stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            os.sched_setaffinity(process.pid, cpus)
            assert process.stdout is not None
            urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}")
        yield urls
