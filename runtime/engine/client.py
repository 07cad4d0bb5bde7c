"""A front end's handle on an engine: in a process of its own, or in a thread of this one.

Owns the channel, and the life and death of what is at its other end. Knows messages only as far
as the start needs them; requests and their bookkeeping belong to the caller.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from ..config.codec import config_to_dict
from ..config.engine import EngineConfig
from ..errors import CorunError, EngineDeadError, rebuild_error
from .channel import AsyncChannel, Channel, ChannelError
from .loop import serve_channel
from .messages import FromEngine, Ready, Shutdown, StartupFailed, StartupProgress, ToEngine
from .process import DEFAULT_FACTORY, load_factory

_EXIT_GRACE_S = 5.0  # after Shutdown: a step may have to end first
_DEATH_GRACE_S = 0.5  # after the channel's end
_REAP_INTERVAL_S = 0.01
_THREAD_JOIN_S = 10.0

_logger = logging.getLogger(__name__)

OnMessage = Callable[[FromEngine], None]
OnDeath = Callable[[EngineDeadError], None]


class EngineClient(Protocol):
    """An engine as an event loop uses it. All methods belong to the loop that called ``start``."""

    @property
    def config(self) -> EngineConfig:
        """What the engine is built from."""
        ...

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> Ready:
        """Start the engine and wait until it is ready.

        Later messages go to ``on_message``. ``on_death`` is called once if the engine ends without
        ``close``. Raises the error that keeps the engine from starting.
        """
        ...

    def send(self, message: ToEngine) -> None:
        """Send ``message``. Raises ``EngineDeadError``."""
        ...

    async def close(self) -> None:
        """End the engine and leave nothing behind. Idempotent."""
        ...


class _ChannelClient:
    """What both clients share: the channel's end here, the start, and one report of death."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._channel: AsyncChannel[FromEngine] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._on_message: OnMessage | None = None
        self._on_death: OnDeath | None = None
        self._death: EngineDeadError | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_closing = False

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> Ready:
        """See ``EngineClient.start``."""
        assert self._channel is None, "a client starts once"
        self._on_message, self._on_death = on_message, on_death
        self._ready = asyncio.get_running_loop().create_future()
        self._channel = AsyncChannel(FromEngine, self._receive, self._channel_closed)
        ours, theirs = socket.socketpair()
        try:
            await self._channel.open(ours)
            self._launch(theirs)
            return await self._ready
        except BaseException:
            await self.close()
            raise

    def send(self, message: ToEngine) -> None:
        """See ``EngineClient.send``."""
        if self._death is not None:
            raise self._death
        if self._channel is None or self._is_closing:
            raise EngineDeadError("the engine is not running")
        try:
            self._channel.send(message)
        except ChannelError as error:
            raise EngineDeadError(f"the engine takes no messages: {error}") from error

    async def close(self) -> None:
        """See ``EngineClient.close``."""
        if self._channel is None:
            return
        if not self._is_closing:
            with contextlib.suppress(EngineDeadError):
                self.send(Shutdown())
            self._is_closing = True
        was_ready = self._ready is not None and self._ready.done() and _succeeded(self._ready)
        await self._end(_EXIT_GRACE_S if was_ready else _DEATH_GRACE_S)
        if self._ending is not None:
            await self._ending
        self._channel.close()

    # For subclasses.

    def _launch(self, sock: socket.socket) -> None:
        """Start what serves ``sock``, the channel's other end, and hand it over."""
        raise NotImplementedError

    async def _end(self, grace_s: float) -> None:
        """Wait for the end for ``grace_s``, then enforce it. Idempotent."""
        raise NotImplementedError

    def _describe_end(self) -> str:
        """Say how it ended."""
        raise NotImplementedError

    def _begin_death(self) -> None:
        """The other end is gone, or as good as gone: clean up and report. Idempotent."""
        if self._ending is None and not self._is_closing:
            self._ending = asyncio.get_running_loop().create_task(self._die())

    async def _die(self) -> None:
        await self._end(_DEATH_GRACE_S)
        assert self._ready is not None and self._channel is not None and self._on_death is not None
        self._death = EngineDeadError(self._describe_end())
        self._channel.close()
        if not self._ready.done():
            self._ready.set_exception(self._death)
        elif not self._is_closing and _succeeded(self._ready):
            _logger.error("%s", self._death)
            self._on_death(self._death)

    def _channel_closed(self, error: Exception | None) -> None:
        if error is not None:
            _logger.error("the channel to the engine broke: %s", error)
        self._begin_death()

    def _receive(self, message: FromEngine) -> None:
        assert self._ready is not None and self._on_message is not None
        match message:
            case StartupProgress(text):
                _logger.info("%s", text)
            case StartupFailed(kind, error):
                if not self._ready.done():
                    self._ready.set_exception(startup_error(kind, error))
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case _:
                self._on_message(message)


def startup_error(kind: str, message: str) -> CorunError:
    """Return why an engine did not start."""
    return rebuild_error(kind, message, default=EngineDeadError)


def _succeeded(future: "asyncio.Future[Ready]") -> bool:
    return not future.cancelled() and future.exception() is None


class ProcessClient(_ChannelClient):
    """An engine in a process of its own.

    The process is started from ``corun`` alone: the user's main module is not imported again.
    Its death shows as the end of the channel and, on Linux, on its pidfd.
    """

    def __init__(
        self, config: EngineConfig, *, log_level: str = "info", factory: str = DEFAULT_FACTORY
    ) -> None:
        super().__init__(config)
        self._log_level = log_level
        self._factory = factory
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, once it has started."""
        return None if self._process is None else self._process.pid

    def _launch(self, sock: socket.socket) -> None:
        command = [sys.executable, "-P", "-m", f"{__package__}.process"]
        command += ["--fd", str(sock.fileno()), "--parent-pid", str(os.getpid())]
        command += ["--factory", self._factory, "--log-level", self._log_level]
        with sock:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(sock.fileno(),)
            )
        self._watch(self._process.pid)
        assert self._channel is not None
        self._channel.send(config_to_dict(self.config))

    def _watch(self, pid: int) -> None:
        """Learn of the process's end even if somebody else holds its end of the channel."""
        if not hasattr(os, "pidfd_open"):
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # an old kernel, or a sandbox: the channel's end has to do
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def _exited(self) -> None:
        self._close_pidfd()
        # What the process said last is still in the channel, whose end comes next.
        asyncio.get_running_loop().call_later(_DEATH_GRACE_S / 2, self._begin_death)

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
                if asyncio.get_running_loop().time() >= deadline_s:
                    process.kill()
                await asyncio.sleep(_REAP_INTERVAL_S)
        except asyncio.CancelledError:
            process.kill()
            process.wait()
            raise
        finally:
            self._close_pidfd()

    def _describe_end(self) -> str:
        assert self._process is not None
        status = self._process.returncode
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"exited with status {status}"
        return f"the engine process {self._process.pid} {how}"


class ThreadClient(_ChannelClient):
    """An engine in a thread of this process, which changes nothing that other threads share."""

    def __init__(self, config: EngineConfig, *, factory: str = DEFAULT_FACTORY) -> None:
        super().__init__(config)
        self._factory = factory
        self._thread: threading.Thread | None = None

    def _launch(self, sock: socket.socket) -> None:
        # A daemon, so that a forgotten engine does not keep the interpreter from ending; at
        # interpreter exit the finalizer ends the thread in an orderly way.
        thread = threading.Thread(
            target=_serve_in_thread,
            args=(sock, self.config, self._factory),
            name="corun-engine",
            daemon=True,
        )
        self._thread = thread
        thread.start()
        weakref.finalize(self, _end_thread, thread, sock)

    async def _end(self, grace_s: float) -> None:
        if self._thread is None:
            return
        # A thread cannot be killed: what computes now is waited for.
        while self._thread.is_alive():
            await asyncio.sleep(_REAP_INTERVAL_S)

    def _describe_end(self) -> str:
        return "the engine thread has ended; the log says why"


def _serve_in_thread(sock: socket.socket, config: EngineConfig, factory: str) -> None:
    channel: Channel[ToEngine] = Channel(sock, ToEngine)
    try:
        serve_channel(channel, config, load_factory(factory), own_process=False)
    except CorunError as error:
        _logger.error("the engine stops: %s", error)
    except Exception:
        _logger.exception("the engine stops because of an unexpected error")
    finally:
        channel.close()


def _end_thread(thread: threading.Thread, sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    thread.join(_THREAD_JOIN_S)
