"""Full file systems and full shared memory, in mounts that only the server's processes see."""

import contextlib
import errno
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from corun.runtime.demo import demo_adapters_path
from corun.runtime.exit_codes import EXIT_FAILED
from support.attacked import MIB, Attacked, Rows, streams_on
from support.fake_hub import fake_hub
from support.serving import Served, corun_command, wait_until

pytestmark = pytest.mark.faults

SHM = Path("/dev/shm")
CAN_MOUNT = os.geteuid() == 0 and not os.system("unshare --mount mount -t tmpfs tmpfs /dev/shm 2>/dev/null")
NEEDS_MOUNT = pytest.mark.skipif(not CAN_MOUNT, reason="needs root and mounts of its own")
BASIC = ("--device", "cpu", "--memory-gib", "0.03")
# Compiled code is not stored, so less of it makes a shorter start.
FEW_KERNELS = (
    *"--linear-backend plain --attention-backend torch --fused-kernels off".split(),
    *"--cpu-threads 1".split(),
)
TIMEOUT_S = 60.0
UPPER = demo_adapters_path() / "upper"
NUM_REPOSITORIES = 8


def mounting(sizes: Mapping[Path, str], *, filled: bool = False) -> list[str]:
    """A command with these file systems in memory; ``filled``: which have no room."""
    parts = []
    for path, size in sizes.items():
        parts.append(f"mount -t tmpfs -o mode=700,size={size} tmpfs {path}")
        if filled:
            parts.append(f"(head -c 1G /dev/zero > {path}/ballast 2>/dev/null || true)")
    script = " && ".join([*parts, 'exec "$0" "$@"'])
    return ["unshare", "--mount", "sh", "-c", script, *corun_command()]


class Disk:
    """A file system that a server sees."""

    def __init__(self, served: Served, path: Path) -> None:
        self.path = Path(f"/proc/{served.process.pid}/root{path}")
        self._ballast = self.path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (self.path / "more").write_bytes(bytes(1 << 13))
        (self.path / "more").unlink()

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("disks")
    disks = {name: root / name for name in ("state", "hub")}
    for path in disks.values():
        path.mkdir()
    return disks


@pytest.fixture(scope="module")
def attacked(disks: dict[str, Path], rows: Rows) -> Iterator[Attacked]:
    """All that it writes is on file systems of its own."""
    repositories = {f"acme/upper{number}": UPPER for number in range(NUM_REPOSITORIES)}
    options = (
        *BASIC,
        *("--lora-state-file", str(disks["state"] / "state.json")),
        *("--request-log", str(disks["state"] / "requests")),
        *"--lora-resolver hub:acme --allow-runtime-lora-updating".split(),
    )
    command = mounting({disks["state"]: "1m", disks["hub"]: "32m", SHM: "200m"})
    with fake_hub(repositories) as url:
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(disks["hub"]), "HF_HUB_OFFLINE": "0"}
        with (
            Served(*options, command=command, environment=environment) as served,
            streams_on(served, rows) as attacked,
        ):
            yield attacked


def load(served: Served, name: str) -> httpx.Response:
    return served.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(UPPER)})


def complete(served: Served, name: str) -> httpx.Response:
    return served.post("/v1/completions", {"model": name, "prompt": "abc", "max_tokens": 2})


def names_in(path: Path) -> set[str]:
    return {one["name"] for one in json.loads(path.read_text())["adapters"]}


class Names:
    """A new name for each try."""

    def __init__(self, names: Iterator[str]) -> None:
        self._names = names

    def __call__(self) -> str:
        return next(self._names)


@NEEDS_MOUNT
def test_state_file(attacked: Attacked, disks: dict[str, Path]) -> None:
    served, disk = attacked.served, Disk(attacked.served, disks["state"])
    new = Names(f"state{number}" for number in range(100))

    def attack() -> str:
        first, full, last = new(), new(), new()
        assert load(served, first).status_code == 200
        state = disk.path / "state.json"
        wait_until(lambda: state.exists() and first in names_in(state))
        num_lines = len(served.log_lines)
        disk.fill()
        try:
            assert load(served, full).status_code == 200
            wait_until(
                lambda: any("state.json cannot be written" in line for line in served.log_lines[num_lines:])
            )
            assert complete(served, full).status_code == 200
            assert first in names_in(state) and full not in names_in(state)
        finally:
            disk.free()
        assert load(served, last).status_code == 200
        wait_until(lambda: {first, full, last} <= names_in(state))
        return "200, logged, kept"

    attacked.check("full disk: --lora-state-file", attack)


@NEEDS_MOUNT
def test_request_log(attacked: Attacked, disks: dict[str, Path]) -> None:
    served, disk = attacked.served, Disk(attacked.served, disks["state"])
    log = disk.path / "requests"

    def attack() -> str:
        disk.fill()
        num_bytes = log.stat().st_size
        for _ in range(300):
            assert complete(served, "upper").status_code == 200
        num_lost = 300 - log.read_bytes()[num_bytes:].count(b"\n")
        assert num_lost > 0
        disk.free()
        num_lines = log.read_bytes().count(b"\n")
        assert complete(served, "upper").status_code == 200
        wait_until(lambda: log.read_bytes().count(b"\n") > num_lines)
        for line in log.read_text().splitlines()[-1:]:  # the one before can be cut
            json.loads(line)
        return f"200, {num_lost} lines lost"

    attacked.check("full disk: --request-log", attack)
    assert any("cannot be written" in line or "lost" in line for line in served.log_lines)


@NEEDS_MOUNT
def test_hub_cache(attacked: Attacked, disks: dict[str, Path]) -> None:
    served, disk = attacked.served, Disk(attacked.served, disks["hub"])
    new = Names(f"acme/upper{number}" for number in range(NUM_REPOSITORIES))

    def attack() -> str:
        name = new()
        disk.fill()
        try:
            answer = complete(served, name)
            message = answer.json()["error"]["message"]
            assert answer.status_code in (400, 404), answer.text
            assert name in message and "No space left" in message, message
            assert "Traceback" not in message
        finally:
            disk.free()
        wait_until(lambda: complete(served, name).status_code == 200, TIMEOUT_S)
        return f"{answer.status_code}, then 200"

    attacked.check("full disk: cache of the hub", attack)


@NEEDS_MOUNT
def test_shared_memory_that_becomes_full(attacked: Attacked) -> None:
    served, disk = attacked.served, Disk(attacked.served, SHM)
    new = Names(f"shm{number}" for number in range(1000))
    assert any("posix (/dev/shm has room)" in line for line in served.log_lines)

    def attack() -> str:
        statuses = []
        disk.fill()
        try:
            for _ in range(20):
                name = new()
                statuses.append(load(served, name).status_code)
                if statuses[-1] == 200:
                    statuses.append(complete(served, name).status_code)
            assert complete(served, "upper").status_code == 200
        finally:
            disk.free()
        assert set(statuses) <= {200, 400, 503}, statuses
        name = new()
        assert load(served, name).status_code == 200
        assert complete(served, name).status_code == 200
        return sorted(set(statuses)).__repr__()

    attacked.check("full /dev/shm", attack)


def test_files_that_may_not_grow(rows: Rows, tmp_path: Path) -> None:
    """A limit of the size of files, for machines where nothing can be mounted."""
    state, log = tmp_path / "state.json", tmp_path / "requests"
    options = (
        *BASIC,
        "--lora-state-file",
        str(state),
        "--request-log",
        str(log),
        "--allow-runtime-lora-updating",
    )
    with Served(*options) as served, streams_on(served, rows) as attacked:
        new = Names(f"limited{number}" for number in range(100))

        def attack() -> str:
            first, full, last = new(), new(), new()
            assert load(served, first).status_code == 200
            wait_until(lambda: state.exists() and first in names_in(state))
            with limited(served.processes):
                statuses = [load(served, full).status_code, complete(served, full).status_code]
                assert complete(served, "upper").status_code == 200
            assert first in names_in(state)
            assert load(served, last).status_code == 200
            wait_until(lambda: {first, last} <= names_in(state))
            return f"{statuses}, kept"

        attacked.check("files may not grow", attack)
        assert any("cannot be written" in line for line in served.log_lines)


@contextlib.contextmanager
def limited(processes: list[psutil.Process]) -> Iterator[None]:
    """Let processes write no file beyond its first byte."""
    before = [resource.prlimit(one.pid, resource.RLIMIT_FSIZE) for one in processes]
    for one, (_, hard) in zip(processes, before, strict=True):
        resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        for one, limits in zip(processes, before, strict=True):
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, limits)


def answers(served: Served) -> bool:
    body: dict[str, Any] = {"model": "upper", "messages": [{"role": "user", "content": "hello"}]}
    answer = served.post("/v1/chat/completions", {**body, "temperature": 0})
    return bool(answer.json()["choices"][0]["message"]["content"] == "HELLO")


@NEEDS_MOUNT
def test_a_start_with_full_disks(rows: Rows, tmp_path: Path) -> None:
    """It serves, takes other shared memory, and warns of what is not kept."""
    command = mounting({tmp_path: "64k", SHM: "64k"}, filled=True)
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    with Served(*BASIC, command=command, environment=environment) as served:
        assert any("memfd" in line for line in served.log_lines)
        check_start(served, rows, "start, full state directory and /dev/shm")


@NEEDS_MOUNT
def test_a_start_with_a_full_cache_of_kernels(rows: Rows, tmp_path: Path) -> None:
    command = mounting({tmp_path: "64k"}, filled=True)
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    options = (*BASIC, *FEW_KERNELS)
    with Served(*options, command=command, environment=environment) as served:
        check_start(served, rows, "start, full cache of kernels")


def check_start(served: Served, rows: Rows, name: str) -> None:
    assert answers(served)
    warnings = [line for line in served.log_lines if " WARNING" in line]
    assert 1 <= len(warnings) <= 2, warnings
    assert all(os.strerror(errno.ENOSPC) in line for line in warnings), warnings
    assert not [line for line in served.log_lines if "Traceback" in line]
    rows.add(name, f"serves, warnings: {len(warnings)}")


def test_a_start_without_shared_memory(rows: Rows) -> None:
    """Neither kind of shared memory may have the size: one line says so."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, 8 * MIB))

    done = run_limited(limit)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "shared memory" in last and "(ulimit -f)" in last, last
    rows.add("start without shared memory", f"exit {done.returncode}, ulimit -f named")


def run_limited(limit: Callable[[], None]) -> "subprocess.CompletedProcess[str]":
    command = [*corun_command(), "serve", "--port", "0", *BASIC]
    return subprocess.run(command, preexec_fn=limit, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
