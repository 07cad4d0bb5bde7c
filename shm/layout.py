"""The place, writer and readers of every field that processes share.

This is the only description: code takes offsets from here, and ``FIELDS.md`` shows the same tables.
Offsets are in bytes. A flag has its own cache line, so that a store of one process does not take a
line away from the writer of another flag. It has one writer at a time, except ``done`` and ``naps``.
"""

import struct
from dataclasses import dataclass
from typing import Literal

LINE_BYTES = 64
JOB_BYTES = 128

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
    Field("num_slots", 4, "int32", "creator", "all", "jobs that the team's mailbox holds, a power of two"),
)
"""Line at the start of the control segment; the lines of the team follow."""

TEAM_FIELDS = (
    Field("published", 0, "int32", _HOST, "workers, supervisor", "last job with a complete descriptor"),
    Field("ready", 64, "int32", "accelerator", "workers", "last job with x available"),
    Field(
        "done",
        128,
        "int32",
        "the member that finishes a job last; supervisor for a dead one",
        "accelerator, producer, supervisor",
        "last job that all its members have finished",
    ),
    Field(
        "waiter_sleeps",
        192,
        "int32",
        _HOST,
        "workers, supervisor",
        "1 from before a thread of the producer sleeps on done until it is awake",
    ),
    Field("naps", 256, "int32", "workers", "accelerator on the CPU", "workers that nap for x"),
)
"""Lines of the team; by worker follow the lines of ``WORKER_FIELDS``, and then ``num_slots`` jobs."""

WORKER_FIELDS = (
    Field(
        "worker_sleeps",
        0,
        "int32",
        _WORKER,
        "producer, supervisor",
        "1 from before the worker sleeps on published until it is awake",
    ),
    Field("finished", 64, "int32", _FOR_DEAD, "all", "last job that this worker computes no more"),
    Field("arrived", 128, "int32", _FOR_DEAD, "workers", "last job of which its part of h is computed"),
    Field("heartbeat_ns", 192, "int64", _WORKER, _SUPERVISOR, "time of the worker's last heartbeat"),
    Field("started", 200, "int32", _WORKER, _SUPERVISOR, "last job with a started computation"),
    Field("state", 256, "int64", _SUPERVISOR, "producer, worker", "generation of the worker * 2^32 + status"),
)
"""Lines of one worker."""

JOB_FIELDS = (
    Field("sequence", 0, "int32", _HOST, "workers, supervisor", "number of the job; wraps around"),
    Field("num_tokens", 4, "int32", _HOST, "workers", "rows of x and y"),
    Field("arena_offset", 8, "int64", _HOST, "workers", "of the matrices, in the adapter arena"),
    Field("x_offset", 16, "int64", _HOST, "workers", "of x, in the shared rows"),
    Field("y_offset", 24, "int64", _HOST, "workers", "of y, in the shared rows"),
    Field("h_offset", 32, "int64", _HOST, "workers", "of h, in the shared rows"),
    Field("members", 40, "int64", _HOST, "workers, supervisor", "bit n: worker n computes a part"),
    Field("token_parts", 48, "int32", _HOST, "workers", "parts of the tokens; members of a part share h"),
    Field("predicted_us", 52, "int32", _HOST, _SUPERVISOR, "predicted duration"),
    Field("slowdown_permille", 56, "int32", _HOST, "workers, supervisor", "deliberate slowdown, 1000 = none"),
    Field("is_crowded", 60, "int32", _HOST, "workers", "1: other threads need the members' cores"),
    Field(
        "status",
        64,
        "int32",
        "producer; members and supervisor only set 2",
        _HOST,
        "once done: 1: y is computed, 2: it is not",
    ),
    Field("duration_us", 68, "int32", "members", _HOST, "time since a member began, by the last to finish"),
)
"""One job: the rows of one (layer, input group) of one adapter."""

ROWS_FIELDS = (
    Field("num_tokens", 0, "int64", "creator", "all", "rows of x, of y and of h"),
    Field("x_row_bytes", 8, "int64", "creator", "all", "bytes of the widest row of x"),
    Field("y_row_bytes", 16, "int64", "creator", "all", "bytes of the widest row of y"),
    Field("h_row_bytes", 24, "int64", "creator", "all", "bytes of the widest row of h"),
)
"""Line at the start of the shared rows; all x, all y and all h follow."""


def structure(fields: tuple[Field, ...], num_bytes: int) -> struct.Struct:
    """Packs and unpacks the values of a table, in its order, with gaps, in ``num_bytes``."""
    code, end = "<", 0
    for field in fields:
        code += f"{field.offset - end}x{_CODES[field.kind]}"
        end = field.offset + struct.calcsize(f"<{_CODES[field.kind]}")
    return struct.Struct(f"{code}{num_bytes - end}x")


TEAM_BYTES = len(TEAM_FIELDS) * LINE_BYTES
WORKER_BYTES = (max(field.offset for field in WORKER_FIELDS) // LINE_BYTES + 1) * LINE_BYTES


def offset_in(fields: tuple[Field, ...], name: str) -> int:
    """Offset of a field from the start of its table."""
    return next(field.offset for field in fields if field.name == name)


def jobs_offset(num_workers: int) -> int:
    """Offset of the jobs from the team's lines."""
    return TEAM_BYTES + num_workers * WORKER_BYTES
