"""The processes that ``bench/invocation.py`` starts as its peers, one role each."""

import argparse
import os
import socket

import numba
from corun.shm.atomics import spin_until, store_release
from corun.shm.control import Control
from corun.shm.mailbox import WorkerEnd
from corun.shm.segment import Segment

WORDS_KIND = "words"
DESCRIPTOR_BYTES = 64
RESULT_BYTES = 16
TIMEOUT_S = 60.0


@numba.njit("boolean(int64, int64)", nogil=True)  # type: ignore[untyped-decorator]
def _echo(address: int, num_rounds: int) -> bool:
    for number in range(1, num_rounds + 1):
        if not spin_until(address, number, 60_000_000_000):
            return False
        store_release(address + 64, number)
    return True


def answer_words(fd: int, num_rounds: int) -> None:
    """Answer each round with a word of our own, in compiled code."""
    with Segment.attach(fd, kind=WORDS_KIND) as segment:
        store_release(segment.address + 128, 1)  # ready
        if not _echo(segment.address, num_rounds):
            raise TimeoutError("the other process sends no words")


def answer_mailbox(fd: int, worker: int, spin_ns: int) -> None:
    """A worker's loop without arithmetic."""
    control = Control.attach(fd)
    end = WorkerEnd(control.mailbox(worker), 1)
    if not end.wait_running(TIMEOUT_S):
        raise TimeoutError("no supervisor announces this worker")
    while end.is_running():
        job = end.next_job(spin_ns=spin_ns)
        if job is None or not end.wait_x(job, timeout_s=TIMEOUT_S):
            continue
        end.begin(job)
        end.finish(job)


def answer_socket(fd: int, payload_bytes: int) -> None:
    """The same by socket: a descriptor, and x, come in; a result, and y, go back."""
    message = memoryview(bytearray(DESCRIPTOR_BYTES + payload_bytes))
    answer = bytes(RESULT_BYTES + payload_bytes)
    with socket.socket(fileno=fd) as connection:
        while receive(connection, message):
            connection.sendall(answer)


def receive(connection: socket.socket, message: memoryview) -> bool:
    """Fill ``message``; False if the other side has ended."""
    filled = 0
    while filled < len(message):
        num_bytes = connection.recv_into(message[filled:])
        if num_bytes == 0:
            return False
        filled += num_bytes
    return True


def main() -> None:
    """Pin this process to a CPU and play the role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["words", "mailbox", "socket"])
    parser.add_argument("fd", type=int)
    parser.add_argument("cpu", type=int)
    parser.add_argument("numbers", type=int, nargs="+")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.cpu})
    if arguments.role == "words":
        answer_words(arguments.fd, *arguments.numbers)
    elif arguments.role == "mailbox":
        answer_mailbox(arguments.fd, *arguments.numbers)
    else:
        answer_socket(arguments.fd, *arguments.numbers)


if __name__ == "__main__":
    main()
