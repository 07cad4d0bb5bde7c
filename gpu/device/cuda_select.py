"""Chooses how a CUDA device registers memory, signals and waits: each by a probe, or as asked.

A ladder for each, best first. ``auto`` takes the first rung whose probe passes and says in the log
why those above it do not; a rung that was asked for and does not work is an error.
"""

import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...runtime.errors import ConfigError
from .base import DeviceError, Word
from .cuda_copies import BounceCopies, Copies, DirectCopies
from .cuda_driver import Driver
from .cuda_memory import (
    BounceRegistrar,
    DriverRegistrar,
    Registrar,
    Registrations,
    RuntimeRegistrar,
    register_memory,
)
from .cuda_probe import (
    PAYLOAD_BYTES,
    PAYLOAD_OFFSET,
    ProbeBench,
    StuckStreamError,
    probe_copies,
    probe_signal,
    probe_wait,
)
from .cuda_runtime import Kernels, Runtime
from .cuda_signals import (
    HostSignaller,
    HostWaiter,
    Signaller,
    StreamOpSignaller,
    StreamOpWaiter,
    TritonSignaller,
    TritonWaiter,
    Waiter,
)
from .cuda_streams import EventPool, HostWork, StreamState
from .host_memory import HostMemory

_LOGGER = logging.getLogger(__name__)

_NOT_SEEN = "the device does not see host memory that is not registered"
# Behind the probes' words and payload: a status word per stream, then a go word on its own line.
STATUS_OFFSET = PAYLOAD_OFFSET + PAYLOAD_BYTES
GO_OFFSET = STATUS_OFFSET + 4096
# torch hands out 32 streams of a priority in turn: with more, two would be the same.
MAX_STREAMS = 16
GO_BYTES = 64
# Whole pages.
SCRATCH_BYTES = -(-(GO_OFFSET + MAX_STREAMS * GO_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

# Scratch memory of streams that are stuck: the device may still touch it.
_KEPT: list[HostMemory] = []

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """How a CUDA device works; the first three are the options of the same name."""

    registration: str = "auto"  # driver | runtime | bounce
    signal: str = "auto"  # stream-op | triton | host
    wait: str = "auto"  # stream-op | triton | host
    wait_timeout_s: float = 60.0  # after which a wait by kernel or by the host gives up
    probe_timeout_s: float = 5.0
    num_events: int = 256
    bounce_chunk_bytes: int = 4 * 2**20
    num_bounce_chunks: int = 8


@dataclass(frozen=True, slots=True)
class Loaders:
    """How to get what a machine may lack. Each raises an exception that says what is missing."""

    driver: Callable[[], Driver]
    kernels: Callable[[], Kernels]


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """What was chosen."""

    registrations: Registrations
    copies: Copies
    scratch: HostMemory
    signaller: Signaller
    waiter: Waiter

    def go(self, stream_index: int) -> Word:
        """The word that holds a stream back until the link is free."""
        return self.scratch.word(GO_OFFSET + GO_BYTES * stream_index, f"go {stream_index}")


class Selection:
    """Climbs the three ladders, on a stream of its own."""

    def __init__(
        self,
        runtime: Runtime,
        loaders: Loaders,
        options: CudaOptions,
        *,
        events: EventPool,
        work: HostWork,
        state: StreamState,
    ) -> None:
        self._runtime = runtime
        self._loaders = loaders
        self._options = options
        self._events = events
        self._work = work
        self._state = state
        self._page = mmap.mmap(-1, SCRATCH_BYTES)

    def choose(self) -> Mechanisms:
        """Raises ``ConfigError`` for a rung that was asked for and does not work.

        Raises ``DeviceError`` if none does, and ``StuckStreamError`` if a probe never ended.
        """
        rungs = [
            ("driver", lambda: self._try_registrar(DriverRegistrar(self._loaders.driver()))),
            ("runtime", lambda: self._try_registrar(self._make_runtime_registrar())),
            ("bounce", lambda: self._try_registrar(BounceRegistrar())),
        ]
        registrations, bench = climb("--device-registration", self._options.registration, rungs)
        try:
            return self._choose_words(registrations, bench)
        except StuckStreamError:
            _KEPT.append(bench.scratch)
            raise
        except Exception:
            bench.scratch.close()
            raise

    def _choose_words(self, registrations: Registrations, bench: ProbeBench) -> Mechanisms:
        signaller = climb(
            "--device-signal",
            self._options.signal,
            [
                (name, partial(self._try_signaller, bench, make))
                for name, make in self._signallers().items()
            ],
        )
        waiter = climb(
            "--device-wait",
            self._options.wait,
            [
                (name, partial(self._try_waiter, bench, make))
                for name, make in self._waiters(bench).items()
            ],
        )
        return Mechanisms(registrations, bench.copies, bench.scratch, signaller, waiter)

    def _make_runtime_registrar(self) -> RuntimeRegistrar:
        try:
            driver = self._loaders.driver()
        except DeviceError as error:
            _LOGGER.info("host pointers are taken for device addresses: %s", error)
            return RuntimeRegistrar(self._runtime, None)
        return RuntimeRegistrar(self._runtime, driver)

    def _try_registrar(self, registrar: Registrar) -> tuple[Registrations, ProbeBench]:
        registrations = Registrations(registrar)
        scratch = register_memory(self._runtime, registrations, memoryview(self._page), "scratch")
        try:
            bench = ProbeBench(
                self._runtime,
                self._events,
                self._work,
                self._make_copies(registrar.name),
                self._state,
                scratch,
                self._options.probe_timeout_s,
            )
            probe_copies(bench)
        except StuckStreamError:
            _KEPT.append(scratch)
            raise
        except Exception:
            scratch.close()
            raise
        return registrations, bench

    def _make_copies(self, registration: str) -> Copies:
        if registration != "bounce":
            return DirectCopies(self._runtime)
        return BounceCopies(
            self._runtime,
            self._work,
            chunk_bytes=self._options.bounce_chunk_bytes,
            num_chunks=self._options.num_bounce_chunks,
            timeout_s=self._options.wait_timeout_s,
        )

    def _try_signaller(self, bench: ProbeBench, make: Callable[[], Signaller]) -> Signaller:
        signaller = make()
        _check_seen(bench, signaller.name)
        probe_signal(bench, signaller)
        return signaller

    def _try_waiter(self, bench: ProbeBench, make: Callable[[float], Waiter]) -> Waiter:
        """``make`` takes a deadline: one that can give up does so before its probe does."""
        waiter = make(self._options.probe_timeout_s / 2)
        _check_seen(bench, waiter.name)
        probe_wait(bench, waiter)
        return make(self._options.wait_timeout_s)

    def _signallers(self) -> dict[str, Callable[[], Signaller]]:
        return {
            "stream-op": lambda: StreamOpSignaller(self._runtime, self._loaders.driver()),
            "triton": lambda: TritonSignaller(self._loaders.kernels()),
            "host": lambda: HostSignaller(self._work),
        }

    def _waiters(self, bench: ProbeBench) -> dict[str, Callable[[float], Waiter]]:
        def by_stream_op(timeout_s: float) -> Waiter:
            return StreamOpWaiter(self._runtime, self._loaders.driver())

        def by_triton(timeout_s: float) -> Waiter:
            status = bench.scratch.word(STATUS_OFFSET, "status")
            return TritonWaiter(self._loaders.kernels(), status, timeout_s=timeout_s)

        def by_host(timeout_s: float) -> Waiter:
            return HostWaiter(timeout_s=timeout_s)

        return {"stream-op": by_stream_op, "triton": by_triton, "host": by_host}


def climb(flag: str, asked: str, rungs: Sequence[tuple[str, Callable[[], T]]]) -> T:
    """The first rung that can be made, or the one that was asked for.

    Raises ``ConfigError`` if what was asked for is unknown or does not work, ``DeviceError`` if no
    rung does; ``StuckStreamError`` passes.
    """
    names = [name for name, _ in rungs]
    if asked != "auto" and asked not in names:
        raise ConfigError(f"{flag}: no {asked!r}; choose one of auto, {', '.join(names)}")
    reasons = []
    for name, make in rungs:
        if asked not in {"auto", name}:
            continue
        try:
            made = make()
        except StuckStreamError:
            raise
        except Exception as error:  # whatever a driver or a compiler raises
            reason = f"{type(error).__name__}: {error}"
            if asked == name:
                raise ConfigError(
                    f"{flag} {name} does not work on this machine: {reason}; leave {flag} at auto "
                    "or choose another"
                ) from error
            reasons.append(f"{name}: {reason}")
            _LOGGER.warning("%s: not %s, which fails here: %s", flag, name, reason)
            continue
        _LOGGER.info("%s: %s (%s)", flag, name, "as asked" if asked == name else "probed")
        return made
    raise DeviceError(f"{flag}: nothing works on this machine: {'; '.join(reasons)}")


def _check_seen(bench: ProbeBench, name: str) -> None:
    if name != "host" and bench.scratch.device_address == 0:
        raise DeviceError(_NOT_SEEN)
