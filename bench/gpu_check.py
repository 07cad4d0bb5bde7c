"""Which of the two ways to work with a GPU is right on a machine, and what does it cost?

``--device-sync`` chooses between them: ``stream`` (memory registered with the driver, streams copy,
signal and wait by themselves) and ``host`` (pinned buffers, the engine's threads signal and wait).
The questions decide that, and how many of CUDA's hardware queues a process should have: whether
both sides see the same bytes, whether a payload always arrives before its flag, the cost of a round
trip to another process, whether a waiting stream delays other streams, the speed of the link.

Every question runs in a process of its own with a time limit, since a failure here may hang for
good. Prints one JSON line last, the machine's record: `profiles/data/README.md`.

    python bench/gpu_check.py --out gpu_check.json      # about eight minutes
    python bench/gpu_check.py --device cpu              # the control flow only, tiny

Besides this checkout, importable as ``corun``, it needs torch, numpy and cuda-bindings.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corun.cpu_workers.process_life import die_with_parent
from corun.gpu.device import cuda_words
from corun.gpu.device.base import Stream, Word
from corun.gpu.device.host_memory import TorchDevice
from corun.runtime.config.environment import MAX_CONNECTIONS
from corun.runtime.errors import ConfigError
from corun.shm.segment import Segment

NOTE_CPU = "control flow on the CPU, no figures of a GPU"
NO_GPU = "torch finds no CUDA device here"

# The segment that a question shares with its peer. A word has a line of its own and one writer.
_KIND = "gpu-check"
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

_SCRIPT = Path(__file__).resolve()
_START_S = 60.0  # of a peer, on a busy machine
_SYNCHRONIZE_S = 20.0
_GRACE_S = 20.0  # for a process to import before its question, and to close after it
_KILLED_S = 20.0  # a killed process ends when its driver has let go of it
_ERROR_LINES = 15
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


class Figures:
    """What a question has found so far, in a file: a killed question leaves its figures."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Keep a figure, and show it."""
        self.values[name] = value
        print(f"    {name}: {json.dumps(value)}", flush=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.values), encoding="utf-8")
        os.replace(part, self._path)


def open_device(kind: str) -> tuple[TorchDevice, torch.device]:
    """The CPU device, or CUDA forced to one way; and where its tensors are."""
    if kind == "cpu":
        from corun.gpu.device.cpu import CpuDevice

        return CpuDevice(), torch.device("cpu")
    from corun.gpu.device.cuda import open_cuda_device
    from corun.gpu.device.cuda_select import CudaOptions

    return open_cuda_device(CudaOptions(sync=kind)), torch.device("cuda")


class Rig:
    """A question's equipment: a device, streams, a registered segment, and a peer."""

    def __init__(self, kind: str, limit_s: float) -> None:
        self._deadline_s = time.monotonic() + limit_s
        self.holds_caller = kind == "host"  # waits then block the enqueuing thread
        self.sizes = TINY if kind == "cpu" else FULL
        self.device, self._where = open_device(kind)
        self.main = self.device.stream("main", is_urgent=True)
        count = self.sizes.num_streams
        self.others = [self.device.stream(f"other {number}") for number in range(count)]
        self.segment = Segment.create(self.sizes.segment_bytes, kind=_KIND, backing="memfd")
        start_s = time.perf_counter()
        self.memory = self.device.register(self.segment.buffer, name="check")
        self.register_s = time.perf_counter() - start_s
        self._peer: subprocess.Popen[bytes] | None = None

    def left_s(self) -> float:
        """Seconds until the question should have ended."""
        return self._deadline_s - time.monotonic()

    def word(self, offset: int) -> Word:
        """A word of the segment, for the device."""
        return self.memory.word(offset, f"word {offset // 64}")

    def load(self, offset: int) -> int:
        """A word, as this process sees it."""
        return cuda_words.load(self.memory.address + offset)

    def store(self, offset: int, value: int) -> None:
        """Store to a word of this process, or to any while no peer runs."""
        cuda_words.store(self.memory.address + offset, value)

    def host(self, num_bytes: int, offset: int = PAYLOADS) -> torch.Tensor:
        """int32 of the segment. To be dropped before ``close``."""
        return self.memory.tensor(offset, (num_bytes // 4,), torch.int32)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """int32 on the device, there before this returns. Not while a wait is outstanding."""
        made = torch.zeros(num_bytes // 4, dtype=torch.int32, device=self._where)
        if self._where.type == "cuda":
            torch.cuda.synchronize()
        return made

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """Enqueue it on the main stream."""
        self.device.launch(self.main, lambda: _fill(tensor, value))

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.device.synchronize(timeout_s=_SYNCHRONIZE_S)

    def start_peer(self, role: str, **options: Any) -> None:
        """Clear the words, start a process with one of ``_ROLES`` and wait until it is there."""
        for offset in range(0, STARTED + 1, 64):
            self.store(offset, 0)
        options |= {"parent": os.getpid(), "limit_s": self.left_s() + _GRACE_S}
        options["is_tiny"] = self.sizes is TINY
        fd = self.segment.fd
        self._peer = subprocess.Popen(
            [sys.executable, str(_SCRIPT), "--peer", role, str(fd), json.dumps(options)], pass_fds=(fd,)
        )
        if not cuda_words.poll(lambda: self.load(STARTED) == 1, _START_S):
            raise TimeoutError(f"the peer for {role} did not start in {_START_S:.0f} s")

    def stop_peer(self) -> None:
        """End it, if it has not ended by itself."""
        if self._peer is not None:
            self._peer.kill()
            self._peer.wait()
            self._peer = None

    def close(self) -> None:
        """Everything, in order; raises if memory is still in use."""
        self.synchronize()  # a wait may still be the peer's to end
        self.stop_peer()
        self.memory.close()
        self.device.close()
        self.segment.close()


class Count:
    """Counts on the device words that are not what they must be; in place, so it only enqueues."""

    def __init__(self, rig: Rig, num_bytes: int) -> None:
        self._rig = rig
        self._difference, self._wrong = rig.zeros(num_bytes), rig.zeros(num_bytes)

    def enqueue(self, values: torch.Tensor, expected: int) -> None:
        """On the main stream."""

        def compute() -> None:
            self._difference.copy_(values).sub_(expected).ne_(0)
            self._wrong.add_(self._difference)

        self._rig.device.launch(self._rig.main, compute)

    def total(self) -> int:
        """How many there were; waits for all streams."""
        self._rig.synchronize()
        return int(self._wrong.sum())


def shared_memory(rig: Rig, figures: Figures) -> None:
    """Does each side read what the other wrote after the mapping, and are copies asynchronous?"""
    num_bytes = rig.sizes.copy_bytes
    figures.put("register_ms_per_gib", _round(rig.register_s * 1e3 * 2**30 / rig.segment.num_bytes))
    host, on_device, count = rig.host(num_bytes), rig.zeros(num_bytes), Count(rig, num_bytes)
    wrong_on_host = 0
    # Its last round is a planted mistake, which both sides must find.
    for number in range(1, rig.sizes.num_rewrites + 2):
        is_planted = number > rig.sizes.num_rewrites
        host.fill_(number)
        rig.device.copy(rig.main, on_device, host)
        count.enqueue(on_device, number + is_planted)
        rig.fill(on_device, -number)
        rig.device.copy(rig.main, host, on_device)
        rig.synchronize()
        wrong_on_host += int((host != -number - is_planted).sum())
    found = {"to_device": count.total(), "to_host": wrong_on_host}
    planted = num_bytes // 4
    figures.put("wrong", {way: {"words": n, "planted": planted} for way, n in found.items()})
    rig.device.wait(rig.main, rig.word(GATE), 1)
    start_s, event = time.perf_counter(), rig.device.event()
    rig.device.copy(rig.main, on_device, host)
    figures.put("copy_call_us", _round((time.perf_counter() - start_s) * 1e6))
    rig.device.record(rig.main, event)
    figures.put("copy_was_queued", not rig.device.is_done(event))
    rig.store(GATE, 1)


def round_trips(rig: Rig, figures: Figures) -> None:
    """How long from a signal to a process and back? The peer polls from Python, and notes when.

    Rounds are enqueued behind a gate and released at once, so the time between two signals is the
    round trip without enqueuing. Where waits block the caller, it is both.
    """
    sizes = rig.sizes
    total = sizes.num_batches * sizes.batch_rounds
    assert total <= MAX_STAMPS
    rig.start_peer("echo", num_rounds=total)
    ready, done = rig.word(READY), rig.word(DONE)
    enqueue_us = []
    for batch in range(sizes.num_batches):
        if rig.holds_caller:
            rig.store(GATE, batch + 1)
        rig.device.wait(rig.main, rig.word(GATE), batch + 1)
        start_s = time.perf_counter()
        for sequence in range(batch * sizes.batch_rounds + 1, (batch + 1) * sizes.batch_rounds + 1):
            rig.device.signal(rig.main, ready, sequence)
            rig.device.wait(rig.main, done, sequence)
        enqueue_us.append((time.perf_counter() - start_s) * 1e6 / sizes.batch_rounds)
        rig.store(GATE, batch + 1)
        rig.synchronize()
    seen_us = rig.segment.view(np.int64, STAMPS, total).copy() / 1e3
    trips_us = np.diff(seen_us.reshape(sizes.num_batches, sizes.batch_rounds), axis=1).ravel()
    figures.put("round_trip_us", _percentiles(trips_us))
    figures.put("enqueue_us_per_round", _round(statistics.median(enqueue_us)))


def streams(rig: Rig, figures: Figures) -> None:
    """Which streams stand still while one waits? The peer ends the wait, so nothing hangs."""
    figures.put(MAX_CONNECTIONS, os.environ.get(MAX_CONNECTIONS))
    num_bytes = 4096
    host, on_device = rig.host(num_bytes), [rig.zeros(num_bytes) for _ in rig.others]

    def enqueue(stream: Stream, tensor: torch.Tensor) -> None:
        rig.device.copy(stream, tensor, host)
        rig.device.launch(stream, lambda: _fill(tensor, 1))
        rig.device.copy(stream, host, tensor)

    for stream, tensor in zip(rig.others, on_device, strict=True):
        enqueue(stream, tensor)  # a kernel's first launch may wait for the whole device
    rig.synchronize()
    rig.start_peer("release", hold_s=rig.sizes.hold_s)
    rig.device.wait(rig.main, rig.word(DONE), 1)
    rig.store(READY, 1)
    events, start_s = [rig.device.event() for _ in rig.others], time.perf_counter()
    for stream, tensor, event in zip(rig.others, on_device, events, strict=True):
        enqueue(stream, tensor)
        rig.device.record(stream, event)
    figures.put("enqueue_ms", _round((time.perf_counter() - start_s) * 1e3))
    went_on: list[bool] = []
    while not went_on or not all(went_on):
        seen = [rig.device.is_done(event) for event in events]
        if rig.load(DONE) != 0:  # what is done now may have waited for that
            break
        went_on = seen
        time.sleep(1e-3)
    went_on = went_on or [False] * len(events)
    figures.put("num_streams", len(events))
    held_up = [s.name for s, is_done in zip(rig.others, went_on, strict=True) if not is_done]
    figures.put("held_up", held_up)


def link(rig: Rig, figures: Figures) -> None:
    """Bytes per second between registered memory and the device, over transfers of a GiB."""
    host, on_device = rig.host(rig.sizes.copy_bytes), rig.zeros(rig.sizes.copy_bytes)
    num_bytes = rig.sizes.copy_bytes * rig.sizes.num_copies
    ways = {"to_device": (on_device, host), "to_host": (host, on_device)}
    for name, (to, source) in ways.items():
        samples = []
        for _ in range(4):
            event, start_s = rig.device.event(), time.perf_counter()
            for _ in range(rig.sizes.num_copies):
                rig.device.copy(rig.main, to, source)
            rig.device.record(rig.main, event)
            while not rig.device.is_done(event):
                pass  # a sleep would be part of what is measured
            samples.append(time.perf_counter() - start_s)
        figures.put(f"{name}_gb_per_s", _round(num_bytes / statistics.median(samples[1:]) / 1e9))


def order(rig: Rig, figures: Figures) -> None:
    """Is a payload always there before its flag, in both directions?

    A round: the device fills a payload with the round's number, copies it out and signals; the
    peer looks at every word, fills the answer and stores the flag; the device waits, copies it in
    and looks at every word. All on one stream, some rounds under way at once.
    """
    rounds = _Rounds(rig)
    rig.start_peer("answer", num_rounds=rig.sizes.num_rounds)
    figures.put("rounds_wanted", rig.sizes.num_rounds)
    start_s = time.monotonic()
    while rounds.num_sent < rig.sizes.num_rounds and rig.left_s() > 0:
        rounds.run(min(2000, rig.sizes.num_rounds - rounds.num_sent))
    rounds.finish()
    figures.put("rounds", rounds.num_sent)
    figures.put("us_per_round", _round((time.monotonic() - start_s) / rounds.num_sent * 1e6))
    figures.put("wrong", rounds.wrong())


class _Rounds:
    """Enqueues rounds of payload and flag, and counts what was wrong."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        sizes = rig.sizes
        self._out = {size: rig.zeros(size) for size, _ in sizes.payloads}
        self._in = {size: rig.zeros(size) for size, _ in sizes.payloads}
        self._counts = {size: Count(rig, size) for size, _ in sizes.payloads}
        self._ready, self._done = rig.word(READY), rig.word(DONE)
        self._num_received = 0
        self.num_sent = 0
        # Every kernel once before a wait is outstanding: its first launch may hang then.
        for size, _ in sizes.payloads:
            rig.fill(self._out[size], 0)
            self._counts[size].enqueue(self._out[size], 0)
        rig.synchronize()

    def run(self, num_rounds: int) -> None:
        """Enqueue rounds; the launch queue holds the caller back when it is full."""
        for _ in range(num_rounds):
            self._send()
            if self.num_sent > LAG:
                self._receive()

    def finish(self) -> None:
        """Receive what is under way, and wait."""
        while self._num_received < self.num_sent:
            self._receive()
        self._rig.synchronize()

    def wrong(self) -> dict[str, dict[str, int]]:
        """Wrong words by way, with those that were planted among them."""
        planted = [self._rig.sizes.payload_bytes(s) // 4 for s in PLANTED if s <= self.num_sent]
        on_device = sum(count.total() for count in self._counts.values())
        return {
            "to_host": {"words": self._rig.load(WRONG), "planted": sum(planted)},
            "to_device": {"words": on_device, "planted": sum(planted)},
        }

    def _slot(self, sequence: int, size: int, *, is_answer: bool) -> torch.Tensor:
        index = sequence % NUM_SLOTS + (NUM_SLOTS if is_answer else 0)
        return self._rig.host(size, PAYLOADS + index * self._rig.sizes.slot_bytes)

    def _send(self) -> None:
        rig, self.num_sent = self._rig, self.num_sent + 1
        sequence, size = self.num_sent, self._rig.sizes.payload_bytes(self.num_sent)
        rig.fill(self._out[size], sequence + (sequence in PLANTED))
        rig.device.copy(rig.main, self._slot(sequence, size, is_answer=False), self._out[size])
        rig.device.signal(rig.main, self._ready, sequence)

    def _receive(self) -> None:
        rig, self._num_received = self._rig, self._num_received + 1
        sequence, size = self._num_received, self._rig.sizes.payload_bytes(self._num_received)
        rig.device.wait(rig.main, self._done, sequence)
        rig.device.copy(rig.main, self._in[size], self._slot(sequence, size, is_answer=True))
        self._counts[size].enqueue(self._in[size], sequence)


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
        """Store to a word of this peer."""
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


@dataclass(frozen=True, slots=True)
class Question:
    """One question; ``kinds`` on CUDA, each in a process of its own."""

    name: str
    kinds: tuple[str, ...]
    limit_s: float  # per process
    work: Callable[[Rig, Figures], None]
    num_queues: str = "32"  # of CUDA, as the engine sets it


BOTH = ("stream", "host")
QUESTIONS = (
    Question("memory", ("stream",), 40, shared_memory),
    Question("round-trip", BOTH, 30, round_trips),
    Question("streams-8", ("stream",), 30, streams, num_queues="8"),
    Question("streams-32", ("stream",), 30, streams),
    Question("link", BOTH, 40, link),
    Question("order", BOTH, 80, order),
)


def run_question(name: str, kind: str, limit_s: float, figures: Figures) -> None:
    """Answer one question in this process. A way that does not work at all is an answer, too."""
    question = next(question for question in QUESTIONS if question.name == name)
    try:
        rig = Rig(kind, limit_s)
    except ConfigError as error:
        figures.put("refused", str(error))
        return
    try:
        question.work(rig, figures)
    except BaseException:
        rig.stop_peer()  # and no more: the process ends next
        rig.device.release_waits()
        raise
    gc.collect()  # the tensors of the work, which hold the memory
    rig.close()


def find_machine(figures: Figures) -> None:
    """Hardware, driver and versions; ``has_gpu`` decides whether the rest is asked."""
    figures.put("has_gpu", torch.cuda.is_available())
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in cpu_info if line.startswith("model name")]
    figures.put("cpu", names[0] if names else platform.machine())
    figures.put("cores", len(os.sched_getaffinity(0)))
    figures.put("kernel", platform.release())
    figures.put("memlock_limit", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    figures.put("python", platform.python_version())
    figures.put("cuda", torch.version.cuda)
    for package in ("torch", "triton", "cuda-bindings", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            figures.put(package, importlib.metadata.version(package))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        figures.put("gpu", properties.name)
        figures.put("gpu_memory_gib", _round(properties.total_memory / 2**30))
        asked = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max")
        command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader", "-i0"]
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            figures.put("nvidia-smi", dict(zip(asked, said.stdout.strip().split(", "), strict=True)))


def faults_of(answers: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    """Faults that exclude a way; empty if there are none. Pure.

    ``answers``: by question and kind, what ``ask`` returned.
    """
    faults = []
    for name in ("order",) if kind == "host" else ("memory", "order"):
        answer = answers.get(name, {}).get(kind, {"status": "not asked"})
        if answer["status"] != "answered":
            faults.append(f"{name}: {answer['status']}")
        elif "refused" in answer["figures"]:
            faults.append(f"{name}: {answer['figures']['refused']}")
        else:
            for way, found in answer["figures"]["wrong"].items():
                excess = found["words"] - found["planted"]
                if excess > 0:
                    faults.append(f"{name}: {excess} wrong words {way}")
                elif excess < 0 or found["planted"] == 0:
                    faults.append(f"{name}: the check {way} is blind")
    return faults


def decide(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The decision: the better way that works, and the fewest queues. Pure."""
    faults = {kind: faults_of(answers, kind) for kind in BOTH}
    works = [kind for kind in BOTH if not faults[kind]]
    queues = [
        question.num_queues
        for question in QUESTIONS
        if question.work is streams
        and answers.get(question.name, {}).get("stream", {}).get("figures", {}).get("held_up") == []
    ]
    return {
        "device_sync": works[0] if works else None,
        "faults": faults,
        MAX_CONNECTIONS: queues[0] if queues else None,
    }


def ask(name: str, kind: str, limit_s: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a question in a process of its own, for ``limit_s`` and some grace at most."""
    print(f"{name} ({kind}), {limit_s:.0f} s at most", flush=True)
    with tempfile.TemporaryDirectory(prefix="corun-gpu-check-") as folder:
        path, said = Path(folder, "figures.json"), Path(folder, "stderr")
        command = [
            sys.executable,
            str(_SCRIPT),
            "--run",
            name,
            "--kind",
            kind,
            "--limit-s",
            str(limit_s),
            "--figures",
            str(path),
        ]
        start_s = time.monotonic()
        code = run_limited(command, limit_s + _GRACE_S, said, {**os.environ, **(environment or {})})
        answer = {
            "status": {None: "timed-out", 0: "answered"}.get(code, "failed"),
            "seconds": _round(time.monotonic() - start_s),
            "figures": json.loads(path.read_text(encoding="utf-8")) if path.exists() else {},
        }
        if answer["status"] != "answered":
            lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
            answer["error"] = "\n".join(lines[-_ERROR_LINES:])
            print(answer["error"], file=sys.stderr)
    return answer


def run_limited(command: list[str], limit_s: float, said: Path, environment: Mapping[str, str]) -> int | None:
    """Run a command and all that it starts; its exit code, None if it had to be killed.

    What it writes to its standard error goes to the file ``said``.
    """
    with said.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, start_new_session=True, env=dict(environment))
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(limit_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with its children
    with contextlib.suppress(subprocess.TimeoutExpired):  # other questions follow
        process.wait(_KILLED_S)
    return code


def make_record(device: str, wanted: Sequence[str]) -> dict[str, Any]:
    """Ask everything that is wanted and put it together."""
    machine = ask("machine", "cpu", 60.0)
    record: dict[str, Any] = {
        "benchmark": "gpu_check",
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": machine["figures"],
        "answers": {},
    }
    if device == "cpu":
        record["note"] = NOTE_CPU
    if machine["status"] != "answered":
        return {**record, "status": machine["status"], "error": machine["error"]}
    if device == "cuda" and not machine["figures"]["has_gpu"]:
        return {**record, "status": "skipped", "skipped": NO_GPU}
    for question in QUESTIONS:
        if question.name in wanted:
            kinds = question.kinds if device == "cuda" else ("cpu",)
            queues = {MAX_CONNECTIONS: question.num_queues}
            asked = {kind: ask(question.name, kind, question.limit_s, queues) for kind in kinds}
            record["answers"][question.name] = asked
    if device == "cuda":
        record["decision"] = decide(record["answers"])
    statuses = {answer["status"] for by in record["answers"].values() for answer in by.values()}
    return {**record, "status": "answered" if statuses <= {"answered"} else "incomplete"}


def main() -> int:
    """Ask everything, or be the process of one question or a peer; return the exit code."""
    if sys.argv[1:2] == ["--peer"]:
        role, fd, text = sys.argv[2:]
        options = json.loads(text)
        die_with_parent(options["parent"])
        _ROLES[role](Peer(Segment.attach(int(fd), kind=_KIND), options))
        return 0
    names = [question.name for question in QUESTIONS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the JSON line")
    parser.add_argument("--questions", nargs="+", choices=names, default=names, help="default: all of them")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run == "machine":
        find_machine(Figures(options.figures))
        return 0
    if options.run is not None:
        run_question(options.run, options.kind, options.limit_s, Figures(options.figures))
        return 0
    record = make_record(options.device, options.questions)
    line = json.dumps(record)
    if options.out is not None:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return 0 if record["status"] in {"answered", "skipped"} else 1


def _commit() -> str:
    command = ["git", "-C", str(_SCRIPT.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _fill(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)


def _percentiles(values: np.ndarray) -> dict[str, float]:
    at = {f"p{percent}": _round(float(np.percentile(values, percent))) for percent in (50, 99)}
    return {**at, "max": _round(float(values.max())), "num": values.size}


def _round(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
