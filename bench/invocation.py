"""What does an invocation of a worker cost? Words, mailboxes and sockets, in one run.

1. The round trip of a word between two pinned processes, both in compiled code.
2. One invocation from Python: descriptor, signal, wait, release. x, 16 tokens of hidden size 4096,
   is in its place; arithmetic and copies are left out on both sides. To teams of 1, 2, 4 and 8
   receivers: one descriptor, one signal and one wait for all of them.
3. The same over Unix sockets, in turn: with the descriptor and the result only, and with x and y
   as payload, as there is no place.

This process has the first CPU alone; the receivers share the others. With more than one receiver
per CPU, receivers sleep at once instead of spinning, and the figures are marked. The last line is
JSON.

    python bench/invocation.py [--receivers 1 2 4 8] [--pairs 11] [--invocations 1000]
"""

import argparse
import contextlib
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numba
from corun.shm.atomics import spin_until, store_release
from corun.shm.control import Control
from corun.shm.job import Job, JobStatus, WorkerState, WorkerStatus
from corun.shm.mailbox import ProducerEnd, SupervisorEnd
from corun.shm.park import SPIN_NS, wait_until
from corun.shm.segment import Segment
from corun.shm.shared_rows import RowShape, SharedRows
from invocation_peers import DESCRIPTOR_BYTES, RESULT_BYTES, TIMEOUT_S, WORDS_KIND, receive
from paired import MAX_CONTROL_SPREAD, compare, median_interval, report

MAX_ROUND_TRIP_US = 1.0
MAX_INVOCATION_US = 30.0
_NUM_BATCHES = 21


@dataclass(frozen=True)
class Messages:
    """Frozen: figures of two runs compare only if these agree."""

    tokens: int = 16
    hidden: int = 4096
    receivers: tuple[int, ...] = (1, 2, 4, 8)
    pairs: int = 11
    invocations: int = 1000  # of a value
    rounds: int = 20_000  # of a batch of words

    @property
    def payload_bytes(self) -> int:
        """Of x, and of y, in bf16."""
        return self.tokens * self.hidden * 2


@contextlib.contextmanager
def _peers(commands: Sequence[tuple[object, ...]], fds: Sequence[int]) -> Iterator[None]:
    """Run peers (role, descriptor, cpu, numbers); killed at the end if they do not end."""
    script = Path(__file__).with_name("invocation_peers.py")
    with contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen([sys.executable, str(script), *map(str, command)], pass_fds=tuple(fds))
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@numba.njit("boolean(int64, int64, int64)", nogil=True)  # type: ignore[untyped-decorator]
def _ping(address: int, first: int, num_rounds: int) -> bool:
    for number in range(first, first + num_rounds):
        store_release(address, number)
        if not spin_until(address + 64, number, 60_000_000_000):
            return False
    return True


def _round_trips_us(messages: Messages, cpu: int) -> list[float]:
    """Microseconds of one round trip of a word, by batch."""
    num_rounds, values = messages.rounds, []
    with Segment.create(4096, kind=WORDS_KIND) as segment:
        command = ("words", segment.fd, cpu, num_rounds * (_NUM_BATCHES + 1))
        with _peers([command], [segment.fd]):
            wait_until(segment.address + 128, 1, timeout_s=TIMEOUT_S)
            for batch in range(_NUM_BATCHES + 1):
                start = time.perf_counter()
                if not _ping(segment.address, batch * num_rounds + 1, num_rounds):
                    raise TimeoutError("the other process does not answer")
                values.append((time.perf_counter() - start) / num_rounds * 1e6)
    return values[1:]  # the first warms up


class Mailboxes:
    """Invokes all receivers, a team, by its mailbox."""

    def __init__(self, control: Control, rows: SharedRows, messages: Messages) -> None:
        self._shape = rows.shape
        self._messages = messages
        self._members = (1 << control.num_workers) - 1
        self._end = ProducerEnd(control)
        boxes = [control.mailbox(worker) for worker in range(control.num_workers)]
        self._supervisors = [SupervisorEnd(box) for box in boxes]

    def announce(self, status: WorkerStatus) -> None:
        """To all receivers."""
        for end in self._supervisors:
            end.announce(WorkerState(1, status))

    def __call__(self) -> None:
        """Invoke the team once, and take its result."""
        end, shape = self._end, self._shape
        sequence = end.next_sequence
        end.publish(
            Job(
                sequence,
                self._messages.tokens,
                0,
                shape.x_offset(0),
                shape.y_offset(0),
                shape.h_offset(0),
                self._members,
                1,
                100,
            )
        )
        store_release(end.ready_address, sequence)  # as the accelerator does
        end.wait_done(sequence, timeout_s=TIMEOUT_S)
        if end.take_result().status != JobStatus.DONE:
            raise RuntimeError("an invocation failed")


class Sockets:
    """Invokes all receivers by socket."""

    def __init__(self, connections: Sequence[socket.socket], payload_bytes: int) -> None:
        self._connections = connections
        self._message = bytes(DESCRIPTOR_BYTES + payload_bytes)
        self._answer = memoryview(bytearray(RESULT_BYTES + payload_bytes))

    def __call__(self) -> None:
        """Invoke every receiver once, and receive their answers."""
        for connection in self._connections:
            connection.sendall(self._message)
        for connection in self._connections:
            if not receive(connection, self._answer):
                raise RuntimeError("a receiver has ended")


@contextlib.contextmanager
def _mailboxes(messages: Messages, cpus: Sequence[int]) -> Iterator[Mailboxes]:
    """Receivers by mailbox, one to an entry of ``cpus``."""
    shape = RowShape(messages.tokens, messages.hidden * 2, messages.hidden * 2, 4)
    spin_ns = SPIN_NS if len(set(cpus)) == len(cpus) else 0
    with Control.create(num_workers=len(cpus)) as control, SharedRows.create(shape) as rows:
        commands = [("mailbox", control.fd, cpu, worker, spin_ns) for worker, cpu in enumerate(cpus)]
        mailboxes = Mailboxes(control, rows, messages)
        with _peers(commands, [control.fd]):
            mailboxes.announce(WorkerStatus.RUNNING)
            yield mailboxes
            mailboxes.announce(WorkerStatus.STOPPING)


@contextlib.contextmanager
def _sockets(payload_bytes: int, cpus: Sequence[int]) -> Iterator[Sockets]:
    """Receivers by socket, one to an entry of ``cpus``."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in cpus]
        for ends in pairs:
            for end in ends:
                stack.enter_context(end)
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
            # A deadline in the kernel: Python's own would add a system call to each of ours.
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ends[0].setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TIMEOUT_S), 0))
        commands = [
            ("socket", theirs.fileno(), cpu, payload_bytes)
            for (_, theirs), cpu in zip(pairs, cpus, strict=True)
        ]
        stack.enter_context(_peers(commands, [theirs.fileno() for _, theirs in pairs]))
        yield Sockets([ours for ours, _ in pairs], payload_bytes)


def _median_us(invoke: Callable[[], None], num_invocations: int) -> float:
    """Median microseconds of one invocation of all receivers."""
    times = []
    for _ in range(num_invocations):
        start = time.perf_counter_ns()
        invoke()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def _compare(messages: Messages, num_receivers: int, others: Sequence[int]) -> dict[str, Any]:
    """Mailboxes against both kinds of sockets, and against themselves."""
    cpus = [others[index % len(others)] for index in range(num_receivers)]
    figures: dict[str, Any] = {"receivers_share_cores": len(set(cpus)) < num_receivers}
    with (
        _mailboxes(messages, cpus) as mailboxes,
        _sockets(0, cpus) as sockets,
        _sockets(messages.payload_bytes, cpus) as loaded_sockets,
    ):
        by_name: dict[str, Callable[[], None]] = {
            "mailbox": mailboxes,
            "socket_descriptor": sockets,
            "socket_payload": loaded_sockets,
        }
        for invoke in by_name.values():
            _median_us(invoke, 50)  # they start up, and warm up
        for name, other in by_name.items():
            ratio, ours, theirs = compare(
                lambda: _median_us(mailboxes, messages.invocations),
                lambda other=other: _median_us(other, messages.invocations),  # type: ignore[misc]
                messages.pairs,
            )
            if name == "mailbox":
                figures["mailbox_us"] = _summary(ours + theirs)
                figures["control"] = ratio.to_json()
                figures["is_conclusive"] = ratio.spread <= MAX_CONTROL_SPREAD
            else:
                figures[f"{name}_us"] = _summary(theirs)
                figures[f"mailbox_to_{name}"] = ratio.to_json()
    return figures


def _summary(values_us: Sequence[float]) -> dict[str, float]:
    low, high = median_interval(values_us, 0.9)
    names = {"median": statistics.median(values_us), "low": low, "high": high}
    return {name: round(value, 3) for name, value in names.items()}


def _is_at_most(summary: dict[str, float], bound: float) -> bool | None:
    """None where the bound lies in the interval of the median."""
    if summary["high"] <= bound:
        return True
    return False if summary["low"] > bound else None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Messages()
    parser.add_argument("--receivers", type=int, nargs="+", default=default.receivers)
    for name in ("pairs", "invocations", "rounds"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    arguments = vars(parser.parse_args())
    messages = Messages(**{**arguments, "receivers": tuple(arguments["receivers"])})
    own, *others = sorted(os.sched_getaffinity(0))
    if not others:
        parser.error("this needs two CPUs; allow it more (taskset)")
    os.sched_setaffinity(0, {own})
    round_trip = _summary(_round_trips_us(messages, others[0]))
    print(f"round trip of a word: {round_trip['median']:.3f} us", flush=True)
    figures: dict[str, Any] = {
        "cpu_of_producer": own,
        "cpus_of_receivers": others,
        "round_trip_us": round_trip,
    }
    bounds = {"round_trip_at_most_1_us": _is_at_most(round_trip, MAX_ROUND_TRIP_US)}
    for num_receivers in messages.receivers:
        row = figures[f"{num_receivers} receivers"] = _compare(messages, num_receivers, others)
        described = ", ".join(
            f"{name} {value['median']:.1f}" for name, value in row.items() if name.endswith("_us")
        )
        shared = " (on shared cores)" if row["receivers_share_cores"] else ""
        print(f"{num_receivers} receivers{shared}: {described}", flush=True)
        if num_receivers == 1:
            bounds["invocation_at_most_30_us"] = _is_at_most(row["mailbox_us"], MAX_INVOCATION_US)
    report("invocation", asdict(messages), figures, bounds)


if __name__ == "__main__":
    main()
