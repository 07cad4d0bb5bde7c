"""The engine's loop: messages in, a step, messages out, and sleep while there is nothing to do.

``EngineLoop`` drives an ``EngineHost`` from a channel until the peer asks for the end or is gone,
and is where an engine sleeps. It knows nothing of models, devices or of what is at the channel's
other end.
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
from .host import BuiltEngine, EngineHost
from .messages import (
    Ready,
    Shutdown,
    StartupFailed,
    StartupProgress,
    ToEngine,
)


@dataclass(frozen=True, slots=True)
class OwnPolicies:
    """What makes policies that have no name, in place of those that the configuration names."""

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
        """Build it; raises ``CorunError``. Only with ``own_process`` may it change the process.

        ``own_policies`` go before those that ``config`` names.
        """
        ...


class EngineLoop:
    """Runs an engine from a channel until ``Shutdown`` or the channel's end."""

    def __init__(self, assembly: BuiltEngine, channel: Channel[ToEngine]) -> None:
        self._host = EngineHost(assembly)
        self._channel = channel

    def run(self) -> None:
        """Return at the end; whatever an engine raises on its own account passes through.

        If it says that it is dead, open requests are told why.
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
            while self._apply_messages():
                for message in self._host.turn():
                    self._channel.send(message)
                if self._channel.has_unsent:
                    self._channel.flush()
                if not self._host.can_turn:
                    self._sleep(selector)

    def _apply_messages(self) -> bool:
        """Apply what has arrived; return whether to go on."""
        for message in self._channel.receive():
            if isinstance(message, Shutdown):
                self._channel.send(self._host.end_all(EngineDeadError("the engine was shut down")))
                return False
            self._host.handle(message)
        return not self._channel.at_end

    def _sleep(self, selector: selectors.BaseSelector) -> None:
        """Wait until there is something to read, to send if something is left, or time to wake."""
        events = selectors.EVENT_READ
        if self._channel.has_unsent:
            events |= selectors.EVENT_WRITE
        selector.modify(self._channel, events)
        wake_at_s = self._host.wake_at_s()
        selector.select(None if wake_at_s is None else max(0.0, wake_at_s - time.monotonic()))


class _FrontEndGoneError(KeyboardInterrupt):
    """The channel has ended: a start is given up as for an interrupt."""


def serve_channel(
    channel: Channel[ToEngine], config: EngineConfig, build: BuildEngine, *, own_process: bool
) -> bool:
    """Build an engine, tell the peer, run it to its end or to the channel's, free it.

    Returns False if the engine could not start and the peer was told why: that is the peer's to
    report. Raises what is nobody's fault but ours, and what ends an engine that had started.
    """

    def report(text: str) -> None:
        channel.send(StartupProgress(text))
        if channel.at_end:
            raise _FrontEndGoneError

    try:
        assembly = build(config, on_progress=report, own_process=own_process)
    except _FrontEndGoneError:
        _logger.info("the front end has ended, so the engine does not start")
        return True
    except Exception as error:
        is_received = not channel.at_end  # afterwards it ends because the peer has read this
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
        EngineLoop(assembly, channel).run()
        channel.flush_blocking(_LAST_WORDS_TIMEOUT_S)
    return True


@contextlib.contextmanager
def _closed_at_the_end(assembly: BuiltEngine) -> Iterator[None]:
    """Free it; of a dead engine, what fails then hides nothing."""
    try:
        yield
    except EngineDeadError:
        try:
            assembly.close()
        except Exception:
            _logger.exception("a dead engine cannot be closed in order")
        raise
    except BaseException:
        assembly.close()
        raise
    assembly.close()
