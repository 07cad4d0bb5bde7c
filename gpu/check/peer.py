"""The process on the other side of a question's shared memory. It has no CUDA, and loads no torch."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...cpu_workers.process_life import die_with_parent
from ...shm.segment import Segment
from ..device import cuda_words

# The segment that a question shares with its peer. A word has a line of its own and one writer.
KIND = "gpu-check"
READY = 0  # device: newest payload out; or the question, to a peer that releases
DONE = 64  # peer: newest payload back
GATE = 128  # question: holds a stream until all of a batch is enqueued
WRONG = 192  # peer: words of payloads that were not what they had to be
STARTED = 256  # peer: 1 when it is there
STAMPS = 4096  # peer: when it saw each signal, in ns
MAX_STAMPS = 8192
PAYLOADS = 1 << 18  # slots out, then slots back
NUM_SLOTS = 16  # payloads under way at once, in each direction
LAG = NUM_SLOTS // 2
PLANTED = (7, 10)  # rounds with a mistake on each side, so that a blind check shows
_TOO_LATE = 3  # exit code of a peer at its time limit


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done; one set for a GPU and a tiny one to run the control flow."""

    slot_bytes: int  # the largest payload
    payloads: tuple[tuple[int, int], ...]  # bytes, and every how many rounds, largest first
    num_rounds: int  # of payload and flag, if time allows
    num_batches: int  # of round trips
    batch_rounds: int  # enqueued behind a gate; few enough for the launch queue
    copy_bytes: int
    num_copies: int  # of that size, to measure a bandwidth
    num_rewrites: int
    num_streams: int  # besides the one that waits
    hold_s: float  # how long that is

    @property
    def segment_bytes(self) -> int:
        """Size of the shared segment: a multiple of the page size."""
        return PAYLOADS + 2 * NUM_SLOTS * self.slot_bytes

    def payload_bytes(self, sequence: int) -> int:
        """Bytes of a round's payload: the largest that is due."""
        return next(size for size, every in self.payloads if sequence % every == 0)


FULL = Sizes(
    slot_bytes=2 << 20,
    payloads=((2 << 20, 1000), (512 << 10, 250), (64 << 10, 20), (4 << 10, 1)),
    num_rounds=500_000,
    num_batches=40,
    batch_rounds=100,
    copy_bytes=64 << 20,
    num_copies=16,
    num_rewrites=20,
    num_streams=12,
    hold_s=2.0,
)
TINY = Sizes(
    slot_bytes=8 << 10,
    payloads=((8 << 10, 2), (4 << 10, 1)),
    num_rounds=40,
    num_batches=2,
    batch_rounds=5,
    copy_bytes=64 << 10,
    num_copies=2,
    num_rewrites=3,
    num_streams=12,
    hold_s=0.5,
)


class Peer:
    """The process on the other side of the segment. It has no CUDA, and polls from Python."""

    def __init__(self, segment: Segment, options: Mapping[str, Any]) -> None:
        self.segment, self.options = segment, options
        self.sizes = TINY if options["is_tiny"] else FULL
        self._deadline_s: float = time.monotonic() + options["limit_s"]

    def spin(self, offset: int, target: int) -> None:
        """Wait for a word; ends the process when its time is over."""
        address = self.segment.address + offset
        while not cuda_words.is_reached(address, target):
            if time.monotonic() > self._deadline_s:
                sys.exit(_TOO_LATE)

    def store(self, offset: int, value: int) -> None:
        cuda_words.store(self.segment.address + offset, value)


def _echo(peer: Peer) -> None:
    """Answer every signal, and note when it was seen."""
    stamps = peer.segment.view(np.int64, STAMPS, MAX_STAMPS)
    peer.store(STARTED, 1)
    for sequence in range(1, peer.options["num_rounds"] + 1):
        peer.spin(READY, sequence)
        stamps[sequence - 1] = time.monotonic_ns()
        peer.store(DONE, sequence)


def _answer(peer: Peer) -> None:
    """Look at every word of each payload, fill the answer, and signal it."""
    count = 2 * NUM_SLOTS * peer.sizes.slot_bytes // 4
    slots = peer.segment.view(np.int32, PAYLOADS, count).reshape(2, NUM_SLOTS, -1)
    num_wrong = 0
    peer.store(STARTED, 1)
    for sequence in range(1, peer.options["num_rounds"] + 1):
        peer.spin(READY, sequence)
        num_words, slot = peer.sizes.payload_bytes(sequence) // 4, sequence % NUM_SLOTS
        num_wrong += int(np.count_nonzero(slots[0, slot, :num_words] != sequence))
        slots[1, slot, :num_words] = sequence + (sequence in PLANTED)
        peer.store(WRONG, min(num_wrong, 2**31 - 1))
        peer.store(DONE, sequence)


def _release(peer: Peer) -> None:
    """End a wait some time after it was armed."""
    peer.store(STARTED, 1)
    peer.spin(READY, 1)
    time.sleep(peer.options["hold_s"])
    peer.store(DONE, 1)


_ROLES = {"echo": _echo, "answer": _answer, "release": _release}


def run_peer(role: str, fd: int, text: str) -> None:
    """Be the peer of a question: one of ``_ROLES`` over the segment ``fd``, with JSON options."""
    options = json.loads(text)
    die_with_parent(options["parent"])
    _ROLES[role](Peer(Segment.attach(fd, kind=KIND), options))
