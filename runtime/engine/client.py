"""A front end's handle on an engine: in a process of its own, or in a thread of this one.

Owns the start and end of that process or thread, not the messages over the channel.
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref

from ..config.codec import config_to_dict
from ..config.engine import EngineConfig
from ..errors import CorunError
from .channel import Channel
from .channel_client import DEATH_GRACE_S, ChannelClient, EngineClient
from .heartbeat import Heartbeat, beating
from .loop import OwnPolicies, serve_channel
from .messages import ToEngine
from .process import STACKS_SIGNAL, load_factory
from .spawn import DEFAULT_FACTORY, SpawnedEngine, spawn_engine

__all__ = ["EngineClient", "ProcessClient", "ThreadClient"]

_REAP_INTERVAL_S = 0.01
_KILL_WAIT_S = 5.0  # a killed process may stay in a call of a driver
_THREAD_JOIN_S = 10.0

_logger = logging.getLogger(__name__)


class ProcessClient(ChannelClient):
    """An engine in a process of its own.

    Its death is noticed by the end of the channel and, on Linux, by its pidfd.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log_level: str = "info",
        factory: str = DEFAULT_FACTORY,
        spawned: SpawnedEngine | None = None,
    ) -> None:
        """``spawned``: a process that has been started; None = ``start`` starts one.

        ``config`` must be that of a process that is configured.
        """
        super().__init__(config)
        self._log_level = log_level
        self._factory = factory
        self._spawned = spawned
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, once it has started."""
        return None if self._process is None else self._process.pid

    def _launch(self) -> socket.socket:
        spawned = self._spawned or spawn_engine(self._log_level, self._factory)
        self._process, self._heartbeat = spawned.process, spawned.heartbeat
        self._watch(spawned.process.pid)
        return spawned.sock

    def _greet(self) -> None:
        assert self._channel is not None
        if self._spawned is None or not self._spawned.is_configured:
            self._channel.send(config_to_dict(self.config))

    def _watch(self, pid: int) -> None:
        """Notice the process's end even if another process has its end of the channel open."""
        if not hasattr(os, "pidfd_open"):
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # an old kernel or a sandbox: only the channel's end is noticed
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def _exited(self) -> None:
        self._close_pidfd()
        # The process's last messages are still in the channel, before its end.
        asyncio.get_running_loop().call_later(DEATH_GRACE_S / 2, self._begin_death)

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    async def _end(self, grace_s: float) -> None:
        process = self._process
        if process is None:
            return
        deadline_s = asyncio.get_running_loop().time() + grace_s
        try:
            while process.poll() is None:
                now_s = asyncio.get_running_loop().time()
                if now_s >= deadline_s:
                    process.kill()
                if now_s >= deadline_s + _KILL_WAIT_S:
                    _logger.error(
                        "the engine process %d was killed and does not end: it is in a call of a "
                        "driver, and its memory of the device stays in use",
                        process.pid,
                    )
                    break
                await asyncio.sleep(_REAP_INTERVAL_S)
        except asyncio.CancelledError:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_WAIT_S)
            raise
        finally:
            self._close_pidfd()

    def _log_stacks(self) -> None:
        if self._process is not None:  # a stopped one prints nothing
            self._process.send_signal(STACKS_SIGNAL)

    def _fate_of_hung(self) -> str:
        return "the engine's process is killed"

    def _describe_end(self) -> str:
        assert self._process is not None
        status = self._process.returncode
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        return f"the engine process {self._process.pid} {how}"


class ThreadClient(ChannelClient):
    """An engine in a thread of this process. It changes no global state."""

    def __init__(
        self, config: EngineConfig, *, factory: str = DEFAULT_FACTORY, own_policies: OwnPolicies | None = None
    ) -> None:
        """``own_policies`` take precedence over those that ``config`` names."""
        super().__init__(config)
        self._factory = factory
        self._own_policies = own_policies
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []  # why the thread ended, if not by ``close``

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._heartbeat = Heartbeat()
        # A daemon, so that an engine left open does not keep the interpreter from ending; at
        # interpreter exit the finalizer ends the thread cleanly.
        thread = threading.Thread(
            target=_serve_in_thread,
            args=(theirs, self._heartbeat, self.config, self._factory, self._own_policies, self._failures),
            name="corun-engine",
            daemon=True,
        )
        self._thread = thread
        thread.start()
        self._finalizer = weakref.finalize(self, _end_thread, thread, theirs, os.getpid())
        return ours

    async def _end(self, grace_s: float) -> None:
        if self._thread is None:
            return
        # A thread cannot be killed: wait for the current step, unless that hangs.
        while self._thread.is_alive():
            if self._hung is not None:
                self._finalizer.detach()  # it would wait, too
                return
            await asyncio.sleep(_REAP_INTERVAL_S)

    def _log_stacks(self) -> None:
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        if frame is not None:
            stack = "".join(traceback.format_stack(frame))
            _logger.error("the stack of the engine's thread:\n%s", stack.rstrip())

    def _fate_of_hung(self) -> str:
        return "the engine's thread is given up; its memory is free when this process has ended"

    def _describe_end(self) -> str:
        return self._failures[0] if self._failures else "the engine thread has ended"


def _serve_in_thread(
    sock: socket.socket,
    heartbeat: Heartbeat,
    config: EngineConfig,
    factory: str,
    own_policies: OwnPolicies | None,
    failures: list[str],
) -> None:
    """Serve until the end; puts a failure into ``failures`` as text, without references."""
    channel: Channel[ToEngine] = Channel(sock, ToEngine)
    try:
        build = load_factory(factory)
        if own_policies is not None:
            build = functools.partial(build, own_policies=own_policies)
        with beating(heartbeat):
            serve_channel(channel, config, build, heartbeat, own_process=False)
    except CorunError as error:
        _logger.error("the engine has stopped: %s", error)
        failures.append(f"the engine failed: {error}")
    except Exception as error:
        _logger.exception("the engine has stopped because of an unexpected error")
        failures.append(f"the engine failed: {type(error).__name__}: {error}")
    finally:
        channel.close()


def _end_thread(thread: threading.Thread, sock: socket.socket, pid: int) -> None:
    if os.getpid() != pid:  # a forked process shares the socket with the one that has the thread
        return
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    thread.join(_THREAD_JOIN_S)
