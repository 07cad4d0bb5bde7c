"""Where things lie in the segment that a question and its peers share, and how much is done.

A word has a line of its own and one writer.
"""

from dataclasses import dataclass

KIND = "gpu-check"

# Words, by their offset in bytes.
READY = 0  # device: newest payload out
DONE = 64  # worker, or whoever releases in its place: newest payload back
GATE = 128  # question: holds a stream until all of a batch is enqueued
ARM = 192  # question: number of the wait that the releaser is to end
CANCEL = 256  # question: number of the wait that it may end at once
HEARTBEAT = 320  # worker: counts up while it works
PEER_PID = 384  # supervisor: its worker's process
STATE = 448  # supervisor: see below
ERRORS = 512  # worker: payload words that were not what they had to be
COMPILED = 576  # worker: 2 if it uses compiled atomics, 1 if Python polls
STARTED = 640  # peer: 1 when it is there

RELEASED_DEAD = 1  # STATE: the worker had ended by itself
RELEASED_HUNG = 2  # STATE: its heartbeat stood still; killed and reaped first

STAMPS_OFFSET = 4096
MAX_STAMPS = 8192
X_OFFSET = 1 << 18

X_SLOTS = 16
"""Payloads under way at once, in each direction."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a question does; one set for a GPU and a tiny one to run the control flow."""

    async_copy_bytes: int
    num_coherence_rounds: int
    num_batches: int  # of round trips
    batch_rounds: int  # enqueued behind a gate; few enough for the launch queue
    load_chunk_bytes: int
    num_load_chunks: int
    num_ordering_rounds: int
    num_replays: int
    num_stale_rounds: int
    hold_s: float  # how long a wait is left outstanding
    bandwidth_bytes: int
    matrix_dim: int
    chunk_bytes: tuple[int, ...]
    max_queue_depth: int


FULL = Sizes(
    async_copy_bytes=8 << 20,
    num_coherence_rounds=100,
    num_batches=40,
    batch_rounds=100,
    load_chunk_bytes=64 << 20,
    num_load_chunks=16,
    num_ordering_rounds=1_000_000,
    num_replays=1000,
    num_stale_rounds=5000,
    hold_s=2.0,
    bandwidth_bytes=2 << 30,
    matrix_dim=8192,
    chunk_bytes=tuple(64 * 1024 * 4**step for step in range(6)),
    max_queue_depth=8192,
)

TINY = Sizes(
    async_copy_bytes=1 << 16,
    num_coherence_rounds=3,
    num_batches=2,
    batch_rounds=5,
    load_chunk_bytes=1 << 16,
    num_load_chunks=2,
    num_ordering_rounds=40,
    num_replays=3,
    num_stale_rounds=10,
    hold_s=0.2,
    bandwidth_bytes=1 << 16,
    matrix_dim=32,
    chunk_bytes=(4096, 16384),
    max_queue_depth=16,
)

# Payloads of the ordering question by share of rounds: most are small, so that a million fit.
PAYLOADS = ((2 << 20, 1000), (512 << 10, 250), (64 << 10, 20), (4 << 10, 1))
MAX_PAYLOAD_BYTES = 2 << 20


def payload_bytes(sequence: int, *, is_tiny: bool) -> int:
    """Bytes of round ``sequence``: the largest size whose turn it is; 4 or 8 KiB if tiny."""
    if is_tiny:
        return (4 << 10) << (sequence % 2)
    return next(size for size, every in PAYLOADS if sequence % every == 0)


def slot_bytes(*, is_tiny: bool) -> int:
    """Bytes between two slots."""
    return (8 << 10) if is_tiny else MAX_PAYLOAD_BYTES


def y_offset(*, is_tiny: bool) -> int:
    """Where the slots of payloads from the worker begin."""
    return X_OFFSET + X_SLOTS * slot_bytes(is_tiny=is_tiny)


def segment_bytes(*, is_tiny: bool) -> int:
    """Size of the shared segment's payload: a multiple of the page size."""
    return y_offset(is_tiny=is_tiny) + X_SLOTS * slot_bytes(is_tiny=is_tiny)
