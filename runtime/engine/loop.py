"""The engine's loop: receives messages, takes a step, sends messages, sleeps without work.

``EngineLoop`` drives an ``EngineHost`` from a channel until the peer ends it or is gone. It is the
only place where an engine sleeps. It knows nothing of models, devices or of the peer.
"""

import contextlib
import logging
import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..config.engine import EngineConfig
from ..errors import CorunError, EngineDeadError
from ..memory.make import MakeMemoryPolicy
from ..scheduler.policy import PolicyFacts, SchedulerPolicy
from .channel import Channel
from .heartbeat import Heartbeat
from .host import BuiltEngine, EngineHost
from .messages import Ready, Shutdown, StartupFailed, StartupProgress, ToEngine


@dataclass(frozen=True, slots=True)
class OwnPolicies:
    """Factories of policies without a name, in place of those that the configuration names."""

    scheduling: Callable[[PolicyFacts], SchedulerPolicy] | None = None
    memory: MakeMemoryPolicy | None = None


_LAST_WORDS_TIMEOUT_S = 2.0

_logger = logging.getLogger(__name__)


class BuildEngine(Protocol):
    """Makes an engine from its configuration."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[str], None],
        own_process: bool,
        own_policies: OwnPolicies | None = None,
    ) -> BuiltEngine:
        """Build the engine; raises ``CorunError``. Only ``own_process`` allows global changes.

        ``own_policies`` take precedence over those that ``config`` names.
        """


class EngineLoop:
    """Runs an engine from a channel until ``Shutdown`` or the channel's end."""

    def __init__(self, assembly: BuiltEngine, channel: Channel[ToEngine], heartbeat: Heartbeat) -> None:
        """``heartbeat`` gets the progress of the loop and of the engine's steps."""
        self._host = EngineHost(assembly)
        self._channel = channel
        self._heartbeat = heartbeat
        assembly.publish_to(heartbeat)

    def run(self) -> None:
        """Run until the end. Exceptions of the engine pass through.

        If the engine is dead, open requests end with its error.
        """
        try:
            self._run()
        except EngineDeadError as error:
            self._channel.send(self._host.end_all(error))
            self._channel.flush_blocking(_LAST_WORDS_TIMEOUT_S)
            raise

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            for fileno in set(self._host.filenos()):
                selector.register(fileno, selectors.EVENT_READ)
            self._heartbeat.begin_turn()
            while self._apply_messages():
                for message in self._host.turn():
                    self._channel.send(message)
                if self._channel.has_unsent:
                    self._channel.flush()
                self._heartbeat.end_turn(self._host.num_advances)
                if not self._host.can_turn:
                    self._sleep(selector)
                self._heartbeat.begin_turn()

    def _apply_messages(self) -> bool:
        """Apply the received messages; return whether to continue."""
        for message in self._channel.receive():
            if isinstance(message, Shutdown):
                self._channel.send(self._host.end_all(EngineDeadError("the engine was shut down")))
                return False
            self._host.handle(message)
        return not self._channel.at_end

    def _sleep(self, selector: selectors.BaseSelector) -> None:
        """Wait for data to read, for room to send what is left, or for the time to wake."""
        events = selectors.EVENT_READ
        if self._channel.has_unsent:
            events |= selectors.EVENT_WRITE
        selector.modify(self._channel, events)
        if not self._host.awaits_device:
            self._heartbeat.rest()
        wake_at_s = self._host.wake_at_s()
        selector.select(None if wake_at_s is None else max(0.0, wake_at_s - time.monotonic()))


class _FrontEndGoneError(KeyboardInterrupt):
    """The channel has ended: the start is abandoned, as for an interrupt."""


def serve_channel(
    channel: Channel[ToEngine],
    config: EngineConfig,
    build: BuildEngine,
    heartbeat: Heartbeat,
    *,
    own_process: bool,
) -> bool:
    """Build an engine, report to the peer, run it until it or the channel ends, free it.

    The loop publishes its progress in ``heartbeat``. Returns False if the engine could not start
    and the peer has received the error, which it reports. Raises bugs of corun, and errors that end
    an engine after its start.
    """

    def report(text: str) -> None:
        channel.send(StartupProgress(text))
        if channel.at_end:
            raise _FrontEndGoneError

    try:
        assembly = build(config, on_progress=report, own_process=own_process)
    except _FrontEndGoneError:
        _logger.info("the front end has ended; the engine does not start")
        return True
    except Exception as error:
        is_received = not channel.at_end  # later, the end means that the peer has read the error
        kind = error.kind if isinstance(error, CorunError) else type(error).__name__
        channel.send(StartupFailed(kind, str(error)))
        channel.flush_blocking(_LAST_WORDS_TIMEOUT_S)
        if isinstance(error, CorunError) and is_received:
            return False
        raise
    with _closed_at_the_end(assembly):
        adapters = tuple(assembly.adapters.infos())
        machine = assembly.core.machine()
        channel.send(Ready(assembly.info, adapters, machine, assembly.tokenizer))
        assembly.begin()
        EngineLoop(assembly, channel, heartbeat).run()
        channel.flush_blocking(_LAST_WORDS_TIMEOUT_S)
    return True


@contextlib.contextmanager
def _closed_at_the_end(assembly: BuiltEngine) -> Iterator[None]:
    """Free the engine at the end; for a dead engine, failures of that are only logged."""
    try:
        yield
    except EngineDeadError:
        try:
            assembly.close()
        except Exception:
            _logger.exception("the engine has died, and freeing its resources failed, too")
        raise
    except BaseException:
        assembly.close()
        raise
    assembly.close()
