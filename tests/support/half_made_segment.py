"""A segment in the state between its creator's two calls, where a kill leaves the name behind."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from .processes import line_of, program

_CREATOR = """
import sys
import posix_ipc
real = posix_ipc.unlink_shared_memory
def stop(name):
    print(name, flush=True)
    sys.stdin.readline()
    real(name)
posix_ipc.unlink_shared_memory = stop
from corun.shm.segment import Segment
Segment.create(4096, kind="test", backing="posix")
print("made", flush=True)
"""


@dataclass(frozen=True)
class HalfMade:
    """The stopped process, which continues at the next line that it reads, and the name."""

    creator: subprocess.Popen[str]
    name: str  # in /dev/shm


@contextlib.contextmanager
def half_made_segment() -> Iterator[HalfMade]:
    """Start a process that makes a segment and stops there; killed at the end."""
    with program(_CREATOR) as creator:
        yield HalfMade(creator, line_of(creator).removeprefix("/"))
