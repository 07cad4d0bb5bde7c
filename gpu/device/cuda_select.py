"""Chooses how a CUDA device handles host memory and words: one of two mechanisms.

``stream``: memory is registered with the driver; streams copy, signal and wait by themselves.
``host``: copies go through pinned buffers, the host agent signals and the calling thread waits.
``auto`` takes ``stream`` if its probe passes, and otherwise logs the reason.
"""

import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass

from ...runtime.config.engine import DEVICE_SYNCS
from ...runtime.errors import ConfigError
from .base import DeviceError, Word
from .cuda_copies import BounceCopies, Copies, DirectCopies
from .cuda_driver import Driver
from .cuda_memory import BounceRegistrar, DriverRegistrar, Registrar, Registrations, register_memory
from .cuda_probe import (
    PAYLOAD_BYTES,
    PAYLOAD_OFFSET,
    ProbeBench,
    StuckStreamError,
    drain,
    probe_copies,
    probe_signal,
    probe_wait,
)
from .cuda_runtime import Runtime
from .cuda_signals import HostSignaller, HostWaiter, Signaller, StreamOpSignaller, StreamOpWaiter, Waiter
from .cuda_streams import EventPool, HostWork, StreamState
from .host_memory import HostMemory

_LOGGER = logging.getLogger(__name__)

# After the probes' words and payload: a go word per stream, each on its own line.
GO_OFFSET = PAYLOAD_OFFSET + PAYLOAD_BYTES
# torch's pool has 32 streams per priority, used in turn: with more, two would be the same.
MAX_STREAMS = 16
GO_BYTES = 64
# Whole pages.
SCRATCH_BYTES = -(-(GO_OFFSET + MAX_STREAMS * GO_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

# Scratch memory of streams that are stuck: the device may still access it.
_KEPT: list[HostMemory] = []


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Options of a CUDA device; ``sync`` is the option ``--device-sync``."""

    sync: str = "auto"  # stream | host
    wait_timeout_s: float = 60.0  # limit of a wait by the host
    probe_timeout_s: float = 5.0
    num_events: int = 256
    bounce_chunk_bytes: int = 4 * 2**20
    num_bounce_chunks: int = 8


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """The chosen mechanism."""

    sync: str  # stream | host
    registrations: Registrations
    copies: Copies
    scratch: HostMemory
    signaller: Signaller
    waiter: Waiter

    def go(self, stream_index: int) -> Word:
        """The word that holds a stream until the link is free."""
        return self.scratch.word(GO_OFFSET + GO_BYTES * stream_index, f"go {stream_index}")


class Selection:
    """Tries the two mechanisms, on a stream of its own.

    ``load_driver`` raises an exception that says what is missing if there is no driver.
    """

    def __init__(
        self,
        runtime: Runtime,
        load_driver: Callable[[], Driver],
        options: CudaOptions,
        *,
        events: EventPool,
        work: HostWork,
        state: StreamState,
    ) -> None:
        self._runtime = runtime
        self._load_driver = load_driver
        self._options = options
        self._events = events
        self._work = work
        self._state = state
        self._page = mmap.mmap(-1, SCRATCH_BYTES)

    def choose(self) -> Mechanisms:
        """Raises ``ConfigError`` if the configured mechanism is unknown or does not work.

        Raises ``DeviceError`` if neither works, and ``StuckStreamError`` if a probe never ended.
        """
        asked = self._options.sync
        if asked not in DEVICE_SYNCS:
            raise ConfigError(
                f"--device-sync: unknown value {asked!r}; choose one of {', '.join(DEVICE_SYNCS)}"
            )
        reasons = []
        for name, try_it in (("stream", self._try_stream), ("host", self._try_host)):
            if asked not in {"auto", name}:
                continue
            try:
                chosen = try_it()
            except StuckStreamError:
                raise
            except Exception as error:  # any error of a driver or its bindings
                reason = f"{type(error).__name__}: {error}"
                if asked == name:
                    raise ConfigError(
                        f"--device-sync {name} does not work on this machine: {reason}; leave "
                        "--device-sync at auto or choose the other"
                    ) from error
                reasons.append(f"{name}: {reason}")
                continue
            _log_choice(name, asked, reasons)
            return chosen
        raise DeviceError(f"--device-sync: none works on this machine: {'; '.join(reasons)}")

    def _try_stream(self) -> Mechanisms:
        runtime, driver = self._runtime, self._load_driver()
        return self._probe(
            "stream",
            DriverRegistrar(driver),
            DirectCopies(runtime),
            StreamOpSignaller(runtime, driver),
            StreamOpWaiter(runtime, driver),
        )

    def _try_host(self) -> Mechanisms:
        copies = BounceCopies(
            self._runtime,
            self._work,
            chunk_bytes=self._options.bounce_chunk_bytes,
            num_chunks=self._options.num_bounce_chunks,
            timeout_s=self._options.wait_timeout_s,
        )
        waiter = HostWaiter(timeout_s=self._options.wait_timeout_s)
        return self._probe("host", BounceRegistrar(), copies, HostSignaller(self._work), waiter)

    def _probe(
        self, sync: str, registrar: Registrar, copies: Copies, signaller: Signaller, waiter: Waiter
    ) -> Mechanisms:
        registrations = Registrations(registrar)
        scratch = register_memory(self._runtime, registrations, memoryview(self._page), "scratch")
        bench = ProbeBench(
            self._runtime,
            self._events,
            self._work,
            copies,
            self._state,
            scratch,
            self._options.probe_timeout_s,
        )
        try:
            try:
                probe_copies(bench)
                probe_signal(bench, signaller)
                probe_wait(bench, waiter)
            except StuckStreamError:
                raise
            except Exception:
                drain(bench)  # its memory is about to be unmapped
                raise
        except StuckStreamError:
            _KEPT.append(scratch)
            raise
        except Exception:
            scratch.close()
            raise
        return Mechanisms(sync, registrations, copies, scratch, signaller, waiter)


def _log_choice(name: str, asked: str, reasons: list[str]) -> None:
    if not reasons:
        _LOGGER.info("--device-sync: %s (%s)", name, "configured" if asked == name else "probed")
        return
    _LOGGER.warning(
        "--device-sync: %s, which is slower (copies go through buffers, and waits for CPU workers "
        "hold the engine's thread), because the other mechanism does not work here: %s",
        name,
        "; ".join(reasons),
    )
