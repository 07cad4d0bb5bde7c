"""The processes on the other side of the shared segment: workers, a releaser, a supervisor.

Started with a descriptor of the segment. They use the compiled atomics of ``shm`` where
numba is there, and poll from Python where it is not: on x86-64 that orders as much, but is slower,
so the word ``COMPILED`` says which. None of them touches the accelerator.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from corun.cpu_workers.process_life import die_with_parent
from corun.gpu.device import cuda_words
from corun.shm.segment import Segment
from corun.shm.words import has_reached

from gpu_checks import layout

LATE = 3
"""Exit code of a peer whose time was over."""


class Words(Protocol):
    """Loads, stores and a bounded spin on 4-byte words at raw addresses."""

    is_compiled: bool

    def load(self, address: int) -> int:
        """With acquire order."""
        ...

    def store(self, address: int, value: int) -> None:
        """With release order."""
        ...

    def spin(self, address: int, target: int, timeout_s: float) -> bool:
        """Until the word has reached ``target``; False after the timeout."""
        ...


class CompiledWords:
    """``shm.atomics``."""

    is_compiled = True

    def __init__(self) -> None:
        """Raises ImportError without numba, and what a numba raises that cannot compile here."""
        from corun.shm import atomics

        self._atomics = atomics

    def load(self, address: int) -> int:
        """See ``Words``."""
        return int(self._atomics.load_acquire(address))

    def store(self, address: int, value: int) -> None:
        """See ``Words``."""
        self._atomics.store_release(address, value)

    def spin(self, address: int, target: int, timeout_s: float) -> bool:
        """See ``Words``."""
        return bool(self._atomics.spin_until(address, target, int(timeout_s * 1e9)))


class PolledWords:
    """Python polls through ctypes."""

    is_compiled = False

    def load(self, address: int) -> int:
        """See ``Words``."""
        return cuda_words.load(address)

    def store(self, address: int, value: int) -> None:
        """See ``Words``."""
        cuda_words.store(address, value)

    def spin(self, address: int, target: int, timeout_s: float) -> bool:
        """See ``Words``."""
        deadline_s = time.monotonic() + timeout_s
        while not has_reached(cuda_words.load(address), target):
            if time.monotonic() >= deadline_s:
                return False
        return True


def choose_words(name: str) -> Words:
    """``auto`` takes the compiled ones where numba works, ``polled`` never does."""
    if name == "auto":
        try:
            return CompiledWords()
        except Exception as error:  # missing, or not made for this numpy or this Python
            print(f"peer: polls from Python, for numba fails: {error!r}", file=sys.stderr)
    return PolledWords()


class Peer:
    """What every peer has: the segment, its words, and a deadline."""

    def __init__(self, segment: Segment, options: dict[str, Any]) -> None:
        self.segment = segment
        self.base = segment.address
        self.options = options
        self.words = choose_words(options.get("words", "auto"))
        self._deadline_s: float = time.monotonic() + options["limit_s"]

    def left_s(self) -> float:
        """Seconds until this peer gives up; ends the process if there are none."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            sys.exit(LATE)
        return left_s

    def spin(self, offset: int, target: int) -> None:
        """Wait for a word, in slices, for as long as this peer lives."""
        while not self.words.spin(self.base + offset, target, min(0.5, self.left_s())):
            pass

    def rest(self, offset: int, target: int, timeout_s: float) -> bool:
        """Wait for a word asleep, for those whom a millisecond does not matter.

        On a busy machine a sleeper is run at once where one that spins has to queue.
        """
        return cuda_words.poll(lambda: has_reached(self.load(offset), target), timeout_s)

    def store(self, offset: int, value: int) -> None:
        """Store to a word of this peer."""
        self.words.store(self.base + offset, value)

    def load(self, offset: int) -> int:
        """Load any word."""
        return self.words.load(self.base + offset)

    def begin(self) -> None:
        """Say that this peer is there."""
        self.store(layout.COMPILED, 1 + self.words.is_compiled)
        self.store(layout.STARTED, 1)


def echo(peer: Peer) -> None:
    """Answer every signal; note when it was seen and when the answer was out, in ns."""
    num_rounds = peer.options["num_rounds"]
    stamps = peer.segment.view(np.int64, layout.STAMPS_OFFSET, layout.MAX_STAMPS)
    peer.begin()
    for sequence in range(1, num_rounds + 1):
        peer.spin(layout.READY, sequence)
        seen_ns = time.monotonic_ns()
        peer.store(layout.DONE, sequence)
        stamps[2 * sequence - 2] = seen_ns
        stamps[2 * sequence - 1] = time.monotonic_ns()


def check(peer: Peer) -> None:
    """Look at every word of each payload, fill the answer, and signal it."""
    is_tiny = peer.options["is_tiny"]
    stride = layout.slot_bytes(is_tiny=is_tiny)
    count = layout.X_SLOTS * stride // 4
    x = peer.segment.view(np.int32, layout.X_OFFSET, count).reshape(layout.X_SLOTS, -1)
    y = peer.segment.view(np.int32, layout.y_offset(is_tiny=is_tiny), count)
    y = y.reshape(layout.X_SLOTS, -1)
    num_errors = 0
    planted = set(peer.options["planted"])
    peer.begin()
    for sequence in range(1, peer.options["num_rounds"] + 1):
        peer.spin(layout.READY, sequence)
        num_words = layout.payload_bytes(sequence, is_tiny=is_tiny) // 4
        slot = sequence % layout.X_SLOTS
        num_errors += int(np.count_nonzero(x[slot, :num_words] != sequence))
        y[slot, :num_words] = sequence + (sequence in planted)
        peer.store(layout.ERRORS, min(num_errors, 2**31 - 1))
        peer.store(layout.DONE, sequence)


def answer_constant(peer: Peer) -> None:
    """The worker of a captured graph: flags are 0 and 1, and are set back by whoever waited."""
    x = peer.segment.view(np.int32, layout.X_OFFSET, 1024)
    y = peer.segment.view(np.int32, layout.X_OFFSET + 4096, 1024)
    num_errors = 0
    peer.begin()
    for replay in range(1, peer.options["num_rounds"] + 1):
        peer.spin(layout.READY, 1)
        num_errors += int(np.count_nonzero(x != replay))
        peer.store(layout.READY, 0)
        y[:] = 2 * replay
        peer.store(layout.ERRORS, num_errors)
        peer.store(layout.DONE, 1)


def stale(peer: Peer) -> None:
    """Overwrite one and the same payload each time the device has read it."""
    y = peer.segment.view(np.int32, layout.X_OFFSET, 1024)
    peer.begin()
    for sequence in range(1, peer.options["num_rounds"] + 1):
        peer.spin(layout.READY, sequence)
        y[:] = sequence
        peer.store(layout.DONE, sequence)


def release(peer: Peer) -> None:
    """End the waits that it is armed for, ``hold_s`` later or as soon as they are cancelled."""
    peer.begin()
    for number in range(1, peer.options["num_rounds"] + 1):
        if not peer.rest(layout.ARM, number, peer.left_s()):
            sys.exit(LATE)
        peer.rest(layout.CANCEL, number, peer.options["hold_s"])
        peer.store(layout.DONE, number)


def hang(peer: Peer) -> None:
    """Take a job and never finish it; the heart beats."""
    peer.begin()
    if not peer.rest(layout.READY, 1, peer.left_s()):
        sys.exit(LATE)
    beat = 0
    while peer.left_s() > 0:
        beat += 1
        peer.store(layout.HEARTBEAT, beat)
        time.sleep(0.005)


def supervise(peer: Peer) -> None:
    """Own a worker; when it is dead or stands still, reap it, and only then release its waits."""
    options = {**peer.options, "parent": os.getpid()}
    worker = subprocess.Popen(
        command("hang", peer.segment.fd, options), pass_fds=(peer.segment.fd,)
    )
    try:
        peer.store(layout.PEER_PID, worker.pid)
        state = _watch(peer, worker)
    finally:
        worker.kill()
        worker.wait()
    peer.store(layout.STATE, state)
    peer.store(layout.DONE, 1)


def _watch(peer: Peer, worker: "subprocess.Popen[bytes]") -> int:
    last_beat, last_change_s = 0, time.monotonic()
    while peer.left_s() > 0:
        if worker.poll() is not None:
            return layout.RELEASED_DEAD
        beat = peer.load(layout.HEARTBEAT)
        if beat != last_beat or beat == 0:
            last_beat, last_change_s = beat, time.monotonic()
        if time.monotonic() - last_change_s > peer.options["deadline_s"]:
            return layout.RELEASED_HUNG
        time.sleep(0.001)
    raise AssertionError("left_s ends the process")


_ROLES: dict[str, Callable[[Peer], None]] = {
    "echo": echo,
    "check": check,
    "constant": answer_constant,
    "stale": stale,
    "release": release,
    "hang": hang,
    "supervise": supervise,
}


def command(role: str, fd: int, options: dict[str, Any]) -> list[str]:
    """The command line of a peer; ``fd`` is to be passed to it."""
    return [sys.executable, "-m", "gpu_checks.peer", role, str(fd), json.dumps(options)]


def main() -> None:
    """Run one role on the segment of a descriptor."""
    role, fd, text = sys.argv[1:]
    options = json.loads(text)
    die_with_parent(options["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    segment = Segment.attach(int(fd), kind=layout.KIND)
    _ROLES[role](Peer(segment, options))


if __name__ == "__main__":
    main()
