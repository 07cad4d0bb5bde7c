"""The place, writer and readers of every field that processes share.

This is the only description: code takes offsets from here, and ``FIELDS.md`` shows the same tables.
Offsets are in bytes. A flag has its own cache line and one writer, so that a store of one process
does not take a line away from the writer of another flag.
"""

import struct
from dataclasses import dataclass
from typing import Literal

LINE_BYTES = 64
JOB_BYTES = 64
RESULT_BYTES = 16

Kind = Literal["int32", "int64"]
_CODES = {"int32": "i", "int64": "q"}


@dataclass(frozen=True, slots=True)
class Field:
    """A value in shared memory."""

    name: str
    offset: int  # from the start of its table
    kind: Kind
    writer: str
    reader: str
    meaning: str


_HOST = "producer"
_WORKER = "worker"
_SUPERVISOR = "supervisor"
_FOR_DEAD = "worker while running or stopping; supervisor at other times"

CONTROL_FIELDS = (
    Field("num_workers", 0, "int32", "creator", "all", "workers"),
    Field("num_slots", 4, "int32", "creator", "all", "jobs that a mailbox holds, a power of two"),
)
"""Line at the start of the control segment; mailboxes follow, by worker."""

MAILBOX_FIELDS = (
    Field("published", 0, "int32", _HOST, "worker, supervisor", "last job with a complete descriptor"),
    Field(
        "worker_sleeps",
        64,
        "int32",
        _WORKER,
        "producer, supervisor",
        "1 from before the worker sleeps on published until it is awake",
    ),
    Field("ready", 128, "int32", "accelerator", _WORKER, "last job with x available"),
    Field("done", 192, "int32", _FOR_DEAD, "accelerator, producer, supervisor", "last job with a result"),
    Field(
        "waiter_sleeps",
        256,
        "int32",
        _HOST,
        "worker, supervisor",
        "1 from before a thread of the producer sleeps on done until it is awake",
    ),
    Field("heartbeat_ns", 320, "int64", _WORKER, _SUPERVISOR, "time of the worker's last heartbeat"),
    Field("started", 328, "int32", _WORKER, _SUPERVISOR, "last job with a started computation"),
    Field("state", 384, "int64", _SUPERVISOR, "producer, worker", "generation of the worker * 2^32 + status"),
)
"""Lines at the start of a mailbox; ``num_slots`` jobs follow, and then ``num_slots`` results."""

JOB_FIELDS = (
    Field("sequence", 0, "int32", _HOST, "worker, supervisor", "number of the job; wraps around"),
    Field("generation", 4, "int32", _HOST, _WORKER, "of the worker that the job is for"),
    Field("arena_offset", 8, "int64", _HOST, _WORKER, "of the matrices, in the adapter arena"),
    Field("x_offset", 16, "int64", _HOST, _WORKER, "of x, in the rings"),
    Field("y_offset", 24, "int64", _HOST, _WORKER, "of y, in the rings"),
    Field("num_tokens", 32, "int32", _HOST, _WORKER, "rows of x and y"),
    Field("x_stride_bytes", 36, "int32", _HOST, _WORKER, "from a row of x to the next"),
    Field("y_stride_bytes", 40, "int32", _HOST, _WORKER, "from a row of y to the next"),
    Field("predicted_us", 44, "int32", _HOST, _SUPERVISOR, "predicted duration"),
    Field("slowdown_permille", 48, "int32", _HOST, "worker, supervisor", "deliberate slowdown, 1000 = none"),
)
"""One job: a slice of tokens of one (layer, input group) of one adapter."""

RESULT_FIELDS = (
    Field("sequence", 0, "int32", _FOR_DEAD, _HOST, "number of the job"),
    Field("generation", 4, "int32", _FOR_DEAD, _HOST, "of the worker that wrote it"),
    Field("status", 8, "int32", _FOR_DEAD, _HOST, "1: y is computed, 2: it is not"),
    Field("duration_us", 12, "int32", _FOR_DEAD, _HOST, "time since the computation began"),
)
"""One result, in the slot of its job."""

RINGS_FIELDS = (
    Field("num_workers", 0, "int32", "creator", "all", "as in the control segment"),
    Field("num_slots", 4, "int32", "creator", "all", "slots of each ring, a power of two"),
    Field("x_slot_bytes", 8, "int64", "creator", "all", "bytes of a slot of x"),
    Field("y_slot_bytes", 16, "int64", "creator", "all", "bytes of a slot of y"),
)
"""Line at the start of the rings; by worker follow slots of x, then of y."""


def structure(fields: tuple[Field, ...], num_bytes: int) -> struct.Struct:
    """Packs and unpacks the values of a table, in its order, with gaps, in ``num_bytes``."""
    code, end = "<", 0
    for field in fields:
        code += f"{field.offset - end}x{_CODES[field.kind]}"
        end = field.offset + struct.calcsize(f"<{_CODES[field.kind]}")
    return struct.Struct(f"{code}{num_bytes - end}x")


_MAILBOX_OFFSETS = {field.name: field.offset for field in MAILBOX_FIELDS}


def offset_of(name: str) -> int:
    """Offset of a mailbox's field from the mailbox's start."""
    return _MAILBOX_OFFSETS[name]


JOBS_OFFSET = (max(field.offset for field in MAILBOX_FIELDS) // LINE_BYTES + 1) * LINE_BYTES


def results_offset(num_slots: int) -> int:
    """Offset of a mailbox's results from the mailbox's start."""
    return JOBS_OFFSET + num_slots * JOB_BYTES


def mailbox_bytes(num_slots: int) -> int:
    """Size of a mailbox: whole lines."""
    unrounded = results_offset(num_slots) + num_slots * RESULT_BYTES
    return -(-unrounded // LINE_BYTES) * LINE_BYTES
