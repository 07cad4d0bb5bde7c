"""Ray's processes on this machine: a head without CPUs and nodes of one CPU, to be killed."""

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
from corun.runtime.cluster.machines.supervised import AgentLocation

OUTER_HOST, SEPARATE_HOST = "10.77.0.1", "10.77.0.2"  # of this machine, and of the separate node
_NAMESPACE, _BRIDGE, _OUTER = "corun-ray", "corun-ray-br", "corun-ray-0"
_OUTER_NODE = "10.77.0.3"
_HOSTS = "127.0.1.{}"
_HELPERS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # of a raylet
_MARK = "CORUN_TEST_RAY"  # in the environment of all of a cluster's processes
_ANSWER = b"answer: "
_STORE_BYTES = 80 << 20
_DEADLINE_S = 60.0
_LIGHT: dict[str, Any] = {
    "object_store_memory": _STORE_BYTES,
    "include_dashboard": False,
    "include_log_monitor": False,
}


class RayCluster:
    """Ray in a process of its own, which would disturb measurements; use it as a context.

    Nodes are called by their addresses. Nothing of it is left after.
    """

    def __init__(
        self, num_nodes: int = 3, *, redis_port: int | None = None, has_separate: bool = False
    ) -> None:
        """``has_separate``: one more node beside one, in a network of its own, to be cut off."""
        os.environ[_MARK] = uuid.uuid4().hex
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Several at once, on few cores. Ray names it so.
        os.environ["RAY_raylet_start_wait_time_s"] = "120"  # noqa: SIM112
        os.environ.pop("RAY_REDIS_ADDRESS", None)
        if redis_port is not None:
            os.environ["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{redis_port}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.ray_cluster", str(num_nodes), str(has_separate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        self.address: str = self._answer()

    @property
    def nodes(self) -> list[str]:
        """Those that are to be there, but for the head and a separate one."""
        found: list[str] = self._ask("hosts")
        return found

    def begin_head(self) -> None:
        """Start it, on the port that it always has."""
        self._ask("begin_head")

    def begin_node(self, host: str) -> None:
        """Start one that was killed."""
        self._ask("begin_node", host)

    def kill_head(self) -> None:
        """At once, with its control store."""
        self._ask("kill_head")

    def kill_control_store(self) -> None:
        self._ask("kill_control_store")

    def begin_control_store(self) -> None:
        self._ask("begin_control_store")

    def kill_raylet(self, host: str) -> None:
        """And what helps it; workers notice that it has gone."""
        self._ask("kill_raylet", host)

    def kill_node(self, host: str) -> None:
        """With all that runs on it, as when a machine ends."""
        self._ask("kill_node", host)

    def mend(self) -> None:
        """Start nodes again after their raylets have ended by themselves."""
        self._ask("mend")

    def agent_at(self, host: str) -> AgentLocation | None:
        """The agent that an actor on a node holds."""
        return msgspec.convert(self._ask("agent_at", host), AgentLocation | None)

    def cut_off(self) -> None:
        """Let nothing through to the separate node, and nothing from it."""
        _ip("link", "set", _OUTER, "down")

    def let_in(self) -> None:
        _ip("link", "set", _OUTER, "up")

    def close(self) -> None:
        """End all, and wait until nothing of it runs."""
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._ask("close")
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(_DEADLINE_S) == 0

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, name: str, *arguments: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode([name, *arguments]) + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith(_ANSWER), "Ray's process has ended"
        return msgspec.json.decode(line.removeprefix(_ANSWER))


class _Nodes:
    """Ray's nodes, in their process."""

    def __init__(self, num_nodes: int, *, has_separate: bool) -> None:
        from ray.cluster_utils import Cluster

        with socket.create_server(("", 0)) as sock:
            self._port = sock.getsockname()[1]
        # With its own way of ending with this process, nodes could be started by one thread only.
        self._cluster = Cluster(shutdown_at_exit=False)
        atexit.register(self.close)
        self._head_host = OUTER_HOST if has_separate else _HOSTS.format(0)
        self.nodes: dict[str, Any] = {}
        self._network = contextlib.ExitStack()
        try:
            if has_separate:
                self._network.enter_context(_separate_network())
            self.begin_head()
            for number in range(1, num_nodes + 1):
                self.begin_node(_OUTER_NODE if has_separate else _HOSTS.format(number))
            if has_separate:
                self._network.enter_context(_separate_node(self.address()))
        except BaseException:
            self.close()
            raise

    def address(self) -> str:
        return str(self._cluster.address)

    def begin_head(self) -> None:
        self._cluster.add_node(
            num_cpus=0, gcs_server_port=self._port, node_ip_address=self._head_host, **_LIGHT
        )

    def hosts(self) -> list[str]:
        return list(self.nodes)

    def begin_node(self, host: str) -> None:
        self.nodes[host] = self._cluster.add_node(num_cpus=1, node_ip_address=host, **_LIGHT)

    def kill_head(self) -> None:
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def kill_control_store(self) -> None:
        self._cluster.head_node.kill_gcs_server()

    def begin_control_store(self) -> None:
        self._cluster.head_node.start_gcs_server()

    def kill_raylet(self, host: str) -> None:
        node = self.nodes.pop(host)
        helpers = _children(node)
        self._cluster.remove_node(node, allow_graceful=False)
        for process in helpers:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() in _HELPERS:
                    process.kill()

    def kill_node(self, host: str) -> None:
        family = _children(self.nodes[host])
        agent = self.agent_at(host)
        if agent is not None:
            process = psutil.Process(agent.pid)
            family += [process, *process.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.kill_raylet(host)

    def mend(self) -> None:
        lost = [
            host
            for host, node in self.nodes.items()
            if any(name == "raylet" for name, _ in node.dead_processes())
        ]
        for host in lost:
            self.kill_raylet(host)
            self.begin_node(host)

    def agent_at(self, host: str) -> AgentLocation | None:
        for worker in _children(self.nodes[host]):
            with contextlib.suppress(psutil.Error, OSError, msgspec.DecodeError):
                for file in worker.open_files():
                    if file.path.endswith("/held.lock"):
                        path = Path(file.path).with_name("place.json")
                        location = msgspec.json.decode(path.read_bytes(), type=AgentLocation)
                        if psutil.pid_exists(location.pid):
                            return location
        return None

    def close(self) -> None:
        """End all, and wait until nothing of it runs. Idempotent."""
        atexit.unregister(self.close)
        self._network.close()
        for host in list(self.nodes):
            self.kill_node(host)
        head = self._cluster.head_node
        if head is not None:
            head.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            self._cluster.head_node = None
        for agent in supervised_agents():  # which outlive Ray
            agent.kill()
        with contextlib.suppress(FileNotFoundError):
            Path("/tmp/ray/ray_current_cluster").unlink()
        deadline_s = time.monotonic() + _DEADLINE_S
        while rest := processes_of_ray():
            assert time.monotonic() < deadline_s, rest
            for process in rest:  # helpers without a raylet
                process.kill()
            time.sleep(0.1)


def _children(node: Any) -> list[psutil.Process]:
    """Of a node's raylet, if it has not ended."""
    raylets = node.all_processes.get("raylet", ())
    try:
        return [child for one in raylets for child in psutil.Process(one.process.pid).children()]
    except psutil.Error:
        return []


def processes_of_ray() -> list[psutil.Process]:
    """All of Ray's processes that this process has started, with any parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            name = process.name()
            is_ray = name in ("raylet", "gcs_server") or name.startswith("ray::")
            if is_ray and process.environ().get(_MARK) == os.environ[_MARK]:
                found.append(process)
    return found


@contextlib.contextmanager
def _separate_network() -> Iterator[None]:
    """A network namespace, and the one way into it, over a bridge."""
    try:
        _ip("netns", "add", _NAMESPACE)
        _ip("link", "add", _BRIDGE, "type", "bridge")
        for host in (OUTER_HOST, _OUTER_NODE):
            _ip("addr", "add", f"{host}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        _ip("link", "add", _OUTER, "type", "veth", "peer", "name", "eth0", "netns", _NAMESPACE)
        _ip("link", "set", _OUTER, "master", _BRIDGE, "up")
        inside = ("-n", _NAMESPACE)
        _ip(*inside, "addr", "add", f"{SEPARATE_HOST}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "route", "add", "default", "via", OUTER_HOST)
        yield
    finally:
        links = [("link", "del", name) for name in (_OUTER, _BRIDGE)]
        for what in (*links, ("netns", "del", _NAMESPACE)):
            subprocess.run(["ip", *what], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _separate_node(address: str) -> Iterator[None]:
    """A node inside the namespace."""
    command = [
        *"ip netns exec".split(),
        _NAMESPACE,
        sys.executable,
        *"-m ray.scripts.scripts start".split(),
        f"--address={address}",
        f"--node-ip-address={SEPARATE_HOST}",
        *("--num-cpus=1", f"--object-store-memory={_STORE_BYTES}"),
        "--block",
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline_s = time.monotonic() + _DEADLINE_S
            while b"Ray runtime started" not in (text := os.pread(log.fileno(), 1 << 16, 0)):
                assert process.poll() is None and time.monotonic() < deadline_s, text.decode()
                time.sleep(0.1)
            yield
        finally:
            starter = psutil.Process(process.pid)
            family = [*starter.children(recursive=True), starter]
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait(_DEADLINE_S)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def redis() -> Iterator[int]:
    """A Redis server of its own; yields its port."""
    program = shutil.which("redis-server")
    assert program is not None
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [
                program,
                *("--port", str(port)),
                *("--bind", "127.0.0.1"),
                *("--save", ""),
                *("--dir", directory),
                *("--protected-mode", "no"),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            deadline_s = time.monotonic() + _DEADLINE_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < deadline_s
                    time.sleep(0.05)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_DEADLINE_S)


def supervised_agents() -> list[psutil.Process]:
    """Agents of this cluster of Ray, under any supervisor."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_agent = "corun.runtime.cluster.machines.supervised" in process.cmdline()
            if is_agent and process.environ().get(_MARK) == os.environ[_MARK]:
                found.append(process)
    return found


def _serve(num_nodes: int, *, has_separate: bool) -> None:
    """Do what is asked on standard input, line by line, and answer on standard output."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what Ray prints
    nodes = _Nodes(num_nodes, has_separate=has_separate)
    output.write(_ANSWER + msgspec.json.encode(nodes.address()) + b"\n")
    for line in sys.stdin.buffer:
        name, *arguments = msgspec.json.decode(line)
        answer = getattr(nodes, name)(*arguments)
        output.write(_ANSWER + msgspec.json.encode(answer) + b"\n")
    nodes.close()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), has_separate=sys.argv[2] == "True")
