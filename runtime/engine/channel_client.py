"""The common part of all engine clients: start, send, close, and report the engine's death once.

Owns the event loop's end of the channel. Knows only the messages of the start;
requests and their bookkeeping belong to the caller, processes and threads to the subclasses.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from ..config.engine import EngineConfig
from ..errors import EngineDeadError, EngineHungError, rebuild_error
from .channel import AsyncChannel, ChannelError
from .heartbeat import HangState, HangWatch, Heartbeat
from .messages import FromEngine, Ready, Shutdown, StartupFailed, StartupProgress, ToEngine

EXIT_GRACE_S = 5.0  # after Shutdown: a step may have to end first
DEATH_GRACE_S = 0.5  # after the channel's end
SILENCE_S = 2.5  # of a start, after which the log repeats what it does

_logger = logging.getLogger(__name__)

OnMessage = Callable[[FromEngine], None]
OnDeath = Callable[[EngineDeadError], None]


class EngineClient(Protocol):
    """An engine as an event loop uses it. All methods belong to the loop that called ``start``."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def num_heartbeats(self) -> int:
        """Heartbeats of the engine's process, which continue while a step computes."""

    @property
    def hang_watch(self) -> HangWatch:
        """Says whether the engine makes progress (--engine-hang-s)."""

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> Ready:
        """Start the engine and wait until it is ready.

        Later messages go to ``on_message``. ``on_death`` is called once if the engine ends without
        ``close``. Raises the error that prevents the start.
        """

    def send(self, message: ToEngine) -> None:
        """Send ``message``. Raises ``EngineDeadError``."""

    async def close(self) -> None:
        """End the engine and free all its resources. Idempotent."""


class ChannelClient:
    """The common half of ``EngineClient``; subclasses know what serves the other end."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._channel: AsyncChannel[FromEngine] | None = None
        self._heartbeat: Heartbeat | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._on_message: OnMessage | None = None
        self._on_death: OnDeath | None = None
        self._death: EngineDeadError | None = None
        self.hang_watch = HangWatch(config.engine_hang_s)
        self._watching: asyncio.Task[None] | None = None
        self._hung: EngineHungError | None = None  # it has hung for too long, and is given up
        self._ending: asyncio.Task[None] | None = None
        self._is_closing = False
        self._doing = "starting the engine"  # the engine's last progress message
        self._doing_since_s = 0.0

    @property
    def num_heartbeats(self) -> int:
        return 0 if self._heartbeat is None else self._heartbeat.num_beats

    async def start(self, on_message: OnMessage, on_death: OnDeath) -> Ready:
        assert self._channel is None, "a client starts once"
        self._on_message, self._on_death = on_message, on_death
        self._ready = asyncio.get_running_loop().create_future()
        self._channel = AsyncChannel(FromEngine, self._receive, self._channel_closed)
        try:
            await self._channel.open(self._launch())
            self._greet()
            ready = await self._started()
            self._watching = asyncio.get_running_loop().create_task(self._watch_progress())
            return ready
        except BaseException:
            await self.close()
            raise

    def send(self, message: ToEngine) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if self._channel is None or self._is_closing:
            raise EngineDeadError("the engine is not running")
        try:
            self._channel.send(message)
        except ChannelError as error:
            raise EngineDeadError(f"the engine does not accept messages: {error}") from error

    async def close(self) -> None:
        if self._channel is None:
            return
        was_ready = self._ready is not None and self._ready.done() and _succeeded(self._ready)
        if was_ready and not self._is_closing:
            with contextlib.suppress(EngineDeadError):
                self.send(Shutdown())
        self._is_closing = True
        if not was_ready:
            self._channel.close()  # a starting engine only notices the channel's end
        await self._end(EXIT_GRACE_S if was_ready else DEATH_GRACE_S)
        if self._ending is not None:
            await self._ending
        self._stop_watching()
        self._channel.close()

    # For subclasses.

    def _launch(self) -> socket.socket:
        """Start what serves the channel's other end; return this one."""
        raise NotImplementedError

    def _greet(self) -> None:
        """Send the first message, which the other end waits for."""

    async def _end(self, grace_s: float) -> None:
        """Wait for the end for ``grace_s``, then enforce it. Idempotent.

        It may fail to end an engine that hangs.
        """
        raise NotImplementedError

    def _log_stacks(self) -> None:
        """Log the stacks of the other end's threads, for the report of a hang."""
        raise NotImplementedError

    def _fate_of_hung(self) -> str:
        """Say what happens to an engine that hangs."""
        raise NotImplementedError

    def _describe_end(self) -> str:
        raise NotImplementedError

    def _begin_death(self) -> None:
        """The other end is gone or unusable: clean up and report. Idempotent."""
        if self._ending is None and not self._is_closing:
            self._ending = asyncio.get_running_loop().create_task(self._die())

    async def _die(self) -> None:
        await self._end(DEATH_GRACE_S)
        assert self._ready is not None and self._channel is not None and self._on_death is not None
        self._death = self._hung or EngineDeadError(self._describe_end())
        self._stop_watching()
        self._channel.close()
        if not self._ready.done():
            self._ready.set_exception(self._death)
        elif not self._is_closing and _succeeded(self._ready):
            _logger.error("%s", self._death)
            self._on_death(self._death)

    async def _started(self) -> Ready:
        """Wait for the engine; log what it does if it is silent for long."""
        assert self._ready is not None
        now_s = asyncio.get_running_loop().time
        said_s = self._doing_since_s = now_s()
        while True:
            due_s = max(said_s, self._doing_since_s) + SILENCE_S
            if now_s() >= due_s:
                said_s = now_s()
                _logger.info("still %s (%.0f s)", self._doing, said_s - self._doing_since_s)
                continue
            done, _ = await asyncio.wait({self._ready}, timeout=due_s - now_s())
            if done:
                return self._ready.result()

    async def _watch_progress(self) -> None:
        """Look at the engine's progress until it is lost; then end the engine."""
        watch, heartbeat = self.hang_watch, self._heartbeat
        assert heartbeat is not None
        while watch.state is not HangState.LOST:
            await asyncio.sleep(watch.interval_s)
            before = watch.state
            stalled_s = watch.stalled_s
            watch.look(heartbeat.signs(), asyncio.get_running_loop().time())
            if before is watch.state:
                continue
            if watch.state is HangState.STALLED:
                _logger.warning(
                    "%s. It is not ready meanwhile. After %g s of this, its requests end with an "
                    "error and %s. If layers of this model take that long, raise --engine-hang-s",
                    watch.describe(),
                    watch.lost_s,
                    self._fate_of_hung(),
                )
            elif watch.state is HangState.MOVING:
                _logger.info("the engine makes progress again after %.3g s: it is ready", stalled_s)
        self._hung = EngineHungError(f"{watch.describe()}, so it is given up (--engine-hang-s)")
        _logger.error(
            "%s. Its requests end with an error and %s. Look at the device, its driver, and the "
            "stacks of the engine's threads in this log",
            self._hung,
            self._fate_of_hung(),
        )
        self._log_stacks()
        self._begin_death()

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def _channel_closed(self, error: Exception | None) -> None:
        if error is not None:
            _logger.error("the channel to the engine broke: %s", error)
        self._begin_death()

    def _receive(self, message: FromEngine) -> None:
        assert self._ready is not None and self._on_message is not None
        match message:
            case StartupProgress(text):
                _logger.info("%s", text)
                self._doing, self._doing_since_s = text, asyncio.get_running_loop().time()
            case StartupFailed(kind, error):
                if not self._ready.done():
                    self._ready.set_exception(rebuild_error(kind, error, default=EngineDeadError))
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case _:
                self._on_message(message)


def _succeeded(future: "asyncio.Future[Ready]") -> bool:
    return not future.cancelled() and future.exception() is None
