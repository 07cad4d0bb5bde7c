"""Probes a mechanism to copy, to signal and to wait before it is used.

A probe detects what is refused, missing or plainly wrong. It does not prove ordering:
``gpu.check`` tests that in many rounds. Values include wrap-around, and a payload written
just before each flag must be visible after it. Memory is written again after it was mapped, because
some machines accept a registration and then give the device a copy.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...shm.words import wrap
from . import cuda_words
from .base import DeviceError, Word
from .cuda_copies import Copies
from .cuda_runtime import Runtime
from .cuda_signals import Signaller, Waiter
from .cuda_streams import EventPool, HostWork, StreamState
from .host_memory import HostMemory

PAYLOAD_BYTES = 1 << 16
PAYLOAD_OFFSET = 4096
WORD_OFFSET = 64
# On an idle stream a wait for a reached value ends within this time.
_TOO_EARLY_S = 2e-3
# Stored and awaited values: equal, exceeded, and at the limits of signed and unsigned numbers.
_ROUNDS = ((1, 1), (2**31 - 1, 2**31 - 1), (2**31 + 5, 2**31), (2**32 - 1, 2**32 - 1), (2**32 + 2, 2**32))


class ProbeError(DeviceError):
    """The probed mechanism does not work here; another one may."""


class StuckStreamError(DeviceError):
    """Enqueued work does not end. A stream cannot be cancelled, so nothing else is tried."""


@dataclass(frozen=True, slots=True)
class ProbeBench:
    """The probes' own stream, and registered scratch memory."""

    runtime: Runtime
    events: EventPool
    work: HostWork
    copies: Copies
    state: StreamState
    scratch: HostMemory
    timeout_s: float

    @property
    def word(self) -> Word:
        """A word for probes only."""
        return self.scratch.word(WORD_OFFSET, "probe")

    def payload(self) -> torch.Tensor:
        """int32, on the host."""
        return self.scratch.tensor(PAYLOAD_OFFSET, (PAYLOAD_BYTES // 4,), torch.int32)

    def device_payload(self) -> torch.Tensor:
        """int32, zero, on the device; of the payload's size."""
        return self.runtime.make_on_device(PAYLOAD_BYTES).view(torch.int32)

    def ends(self, handle: Any, timeout_s: float) -> bool:
        """Whether the event and the stream's host work are done in time."""
        pending = self.work.pending(self.state)
        return cuda_words.poll(
            lambda: self.runtime.is_done(handle) and self.work.are_done(pending), timeout_s
        )


def probe_copies(bench: ProbeBench) -> None:
    """Copy to the device and back, twice, with new contents in between. Raises ``ProbeError``."""
    host, device = bench.payload(), bench.device_payload()
    for number in (1, 2):
        expected = torch.arange(host.numel(), dtype=torch.int32) * 31 + number
        host.copy_(expected)
        bench.copies.copy(bench.state, device, host)
        _finish(bench, "a copy to the device")
        host.zero_()
        bench.copies.copy(bench.state, host, device)
        _finish(bench, "a copy to the host")
        if not torch.equal(host, expected):
            raise ProbeError(f"copy {number} to the device and back returned other bytes")


def probe_signal(bench: ProbeBench, signaller: Signaller) -> None:
    """The word takes each value, and earlier copies are visible by that time. ``ProbeError``."""
    word, host, device = bench.word, bench.payload(), bench.device_payload()
    cuda_words.store(word.host_address, 0)
    for number, (value, _) in enumerate(_ROUNDS, 1):
        bench.runtime.call(bench.state.handle, partial(_fill, device, number))
        bench.copies.copy(bench.state, host, device)
        signaller.signal(bench.state, word, value)
        if not cuda_words.poll(partial(_holds, word, value), bench.timeout_s):
            raise ProbeError(
                f"the word held {cuda_words.load(word.host_address)} instead of {wrap(value)} "
                f"after {bench.timeout_s:g} s"
            )
        if not bool((host == number).all()):
            raise ProbeError("the payload was copied before the signal, but arrived after it")
        _finish(bench, "a signal")


def probe_wait(bench: ProbeBench, waiter: Waiter) -> None:
    """The stream is held until the word has the value, and then sees earlier writes.

    Raises ``ProbeError`` if it is not held or reads other data, ``StuckStreamError`` if it never
    continues.
    """
    word, host, device = bench.word, bench.payload(), bench.device_payload()
    cuda_words.store(word.host_address, 0)
    for number, (stored, value) in enumerate(_ROUNDS, 1):
        host.fill_(-1)
        if waiter.holds_caller:
            # The waiting thread is also the storing thread.
            _publish(host, word, number, stored)
        waiter.wait(bench.state, word, value)
        bench.copies.copy(bench.state, device, host)
        behind = bench.events.borrow(bench.state)
        is_held = waiter.holds_caller or not bench.ends(behind, _TOO_EARLY_S)
        if not waiter.holds_caller:
            _publish(host, word, number, stored)
        if not bench.ends(behind, bench.timeout_s):
            raise StuckStreamError(
                f"a wait for {wrap(value)} does not end although the word holds {wrap(stored)}: "
                "this process cannot use the device any more; start it with --device-sync host"
            )
        bench.events.give(behind)
        if not is_held:
            raise ProbeError(f"a wait for {wrap(value)} did not hold the stream")
        host.zero_()
        bench.copies.copy(bench.state, host, device)
        _finish(bench, "a copy behind a wait")
        if not bool((host == number).all()):
            raise ProbeError("the stream did not see what was written before the word")


def drain(bench: ProbeBench) -> None:
    """Wait for the operations that a failed probe has enqueued, and ignore their result.

    Raises ``StuckStreamError`` if they do not end.
    """
    handle = bench.events.borrow(bench.state)
    if not bench.ends(handle, bench.timeout_s):
        raise StuckStreamError(f"operations of a failed probe did not end in {bench.timeout_s:g} s")
    bench.events.give(handle)
    bench.state.failure = None


def _publish(host: torch.Tensor, word: Word, number: int, value: int) -> None:
    host.fill_(number)
    cuda_words.store(word.host_address, value)


def _holds(word: Word, value: int) -> bool:
    return cuda_words.load(word.host_address) == wrap(value)


def _fill(tensor: torch.Tensor, number: int) -> None:
    tensor.fill_(number)


def _finish(bench: ProbeBench, what: str) -> None:
    handle = bench.events.borrow(bench.state)
    if not bench.ends(handle, bench.timeout_s):
        raise StuckStreamError(f"{what} is not done after {bench.timeout_s:g} s")
    bench.events.give(handle)
    if bench.state.failure is not None:
        failure, bench.state.failure = bench.state.failure, None
        raise ProbeError(f"{what} failed: {failure}") from failure
