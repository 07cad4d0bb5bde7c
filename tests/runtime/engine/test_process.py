"""The engine process as its parent sees it: arguments, configuration, end of the channel."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from corun.runtime.config.codec import config_to_dict
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine import process
from corun.runtime.engine.channel import Channel, encode_frame
from corun.runtime.engine.heartbeat import Heartbeat, open_heartbeat_file
from corun.runtime.engine.messages import (
    AddRequest,
    AddRequests,
    FromEngine,
    Ready,
    Shutdown,
    StartupFailed,
    StartupProgress,
    StepOutputs,
)
from corun.runtime.errors import ConfigError
from corun.runtime.sampling import SamplingParams
from support.fake_core import FACTORY, MACHINE, SLOW_MODEL, model_info

TESTS_DIR = Path(__file__).parents[2]
# Prepended: the path may select the corun that is tested.
PYTHON_PATH = os.pathsep.join(filter(None, (str(TESTS_DIR), os.environ.get("PYTHONPATH"))))
TIMEOUT_S = 20


class Child:
    """A process of the module, with this end of its channel."""

    def __init__(self, *arguments: str, parent_pid: int | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.sock = ours
        with theirs, open_heartbeat_file() as beats:
            self.heartbeat = Heartbeat(beats.fileno())
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "corun.runtime.engine.process"),
                    *("--fd", str(theirs.fileno()), "--heartbeat-fd", str(beats.fileno())),
                    *("--parent-pid", str(parent_pid or os.getpid())),
                    *("--factory", FACTORY),
                    *arguments,
                ],
                pass_fds=(theirs.fileno(), beats.fileno()),
                env=os.environ | {"PYTHONPATH": PYTHON_PATH},
                stderr=subprocess.PIPE,
            )

    def configure(self, model: str = "fake") -> None:
        self.sock.sendall(encode_frame(config_to_dict(EngineConfig(model=model))))

    def messages_to_the_end(self) -> list[FromEngine]:
        self.sock.settimeout(TIMEOUT_S)
        data = b""
        while chunk := self.sock.recv(1 << 16):
            data += chunk
        reader, writer = socket.socketpair()
        with reader, writer:
            writer.sendall(data)
            writer.shutdown(socket.SHUT_WR)
            return Channel[FromEngine](reader, FromEngine).receive()

    def status(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def log(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        self.sock.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


def test_a_whole_life(child: Child) -> None:
    child.configure()
    request = AddRequest(4, tuple(b"hi"), SamplingParams(seed=0, max_tokens=9))
    open_one = AddRequest(5, tuple(b"SILENT"), SamplingParams(seed=0, max_tokens=9))
    child.sock.sendall(b"".join(map(encode_frame, (AddRequests((request, open_one)), Shutdown()))))
    progress, ready, *rest = child.messages_to_the_end()
    assert progress == StartupProgress("pretending to load")
    assert ready == Ready(model_info("fake"), (), MACHINE)
    updates = [one for step in rest if isinstance(step, StepOutputs) for one in step.updates]
    final = {int(one.request_id): one for one in updates if one.finish_reason is not None}
    assert final.keys() == {4, 5}
    assert final[5].error_kind == "EngineDeadError"
    assert child.status() == 0


def test_a_dead_engine_says_why_before_it_ends(child: Child) -> None:
    child.configure()
    silent = AddRequest(4, tuple(b"SILENT"), SamplingParams(seed=0, max_tokens=9))
    deadly = AddRequest(5, tuple(b"DIE"), SamplingParams(seed=0, max_tokens=9))
    child.sock.sendall(encode_frame(AddRequests((silent, deadly))))
    *_, last = child.messages_to_the_end()
    assert isinstance(last, StepOutputs)
    ends = {one.request_id: (one.error_kind, one.error) for one in last.updates}
    assert ends == dict.fromkeys((4, 5), ("EngineDeadError", "the device is lost"))
    assert child.status() == 1
    log = child.log()
    assert "the device answers nothing" in log  # closing it failed, and hides nothing
    assert log.splitlines()[-1].endswith("the engine has stopped: the device is lost")


def test_the_end_of_the_channel_ends_the_process(child: Child) -> None:
    child.configure()
    channel: Channel[FromEngine] = Channel(child.sock, FromEngine)
    messages: list[FromEngine] = []
    while not any(isinstance(message, Ready) for message in messages):
        select.select([channel], [], [], TIMEOUT_S)
        messages += channel.receive()
    channel.close()
    assert child.status() == 0


def test_a_front_end_that_never_says_anything(child: Child) -> None:
    child.sock.close()
    assert child.status() == 1
    assert "within or before a message" in child.log()


def test_the_end_of_the_channel_ends_a_start(child: Child) -> None:
    child.configure(SLOW_MODEL)
    child.sock.recv(1)
    child.sock.close()
    assert child.status() == 0
    assert "the front end has ended; the engine does not start" in child.log()
    assert "ERROR" not in child.log()


def test_a_bad_configuration_is_named(child: Child) -> None:
    child.sock.sendall(encode_frame({"model": "x", "colour": "green"}))
    assert child.status() == 1
    assert "has no colour" in child.log()


def test_garbage_ends_it_with_an_error(child: Child) -> None:
    child.configure()
    child.sock.sendall(encode_frame(["Nonsense", 1]))
    messages = child.messages_to_the_end()
    assert not [one for one in messages if isinstance(one, StartupFailed)]
    assert child.status() == 1
    assert "cannot be decoded" in child.log()


def test_a_child_of_another_parent_leaves() -> None:
    child = Child(parent_pid=1)
    try:
        assert child.status() == 1
    finally:
        child.close()


def test_cuda_gets_its_queues_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def load(name: str) -> None:
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        raise ConfigError("seen")

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "restored at the end")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(process, "own_child_process", lambda *_: None)
    monkeypatch.setattr(process, "load_factory", load)
    ours, theirs = socket.socketpair()
    with ours, open_heartbeat_file() as beats:
        ours.sendall(encode_frame(config_to_dict(EngineConfig())))
        fds = ["--fd", str(theirs.detach()), "--heartbeat-fd", str(beats.fileno())]
        assert process.main([*fds, "--parent-pid", "1"]) == 1
    assert seen == ["32"]


def test_the_process_dies_with_its_parent() -> None:
    """The parent is killed while the child hangs in a step and sees no channel."""
    parent = subprocess.run(
        [sys.executable, "-c", _PARENT],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert parent.returncode == -9, parent.stderr
    pid = int(parent.stdout)
    deadline = _wait_gone(pid)
    assert deadline, f"process {pid} outlived its parent"


def _wait_gone(pid: int) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        process.wait(TIMEOUT_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True


_PARENT = f"""
import os, signal, socket, subprocess, sys
from corun.runtime.config.codec import config_to_dict
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.channel import encode_frame
from corun.runtime.engine.heartbeat import open_heartbeat_file
ours, theirs = socket.socketpair()
beats = open_heartbeat_file()
fds = theirs.fileno(), beats.fileno()
child = subprocess.Popen(
    [sys.executable, "-m", "corun.runtime.engine.process", "--fd", str(fds[0]),
     "--heartbeat-fd", str(fds[1]), "--parent-pid", str(os.getpid()), "--factory", {FACTORY!r}],
    pass_fds=fds,
)
ours.sendall(encode_frame(config_to_dict(EngineConfig(model="fake"))))
ours.recv(1)
os.set_inheritable(ours.fileno(), True)
keeper = subprocess.Popen(["sleep", "5"], pass_fds=(ours.fileno(),), stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL)  # keeps the channel open
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
