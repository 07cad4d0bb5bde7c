"""The equipment of one question to a GPU: a device, streams, shared memory, and a peer process."""

import json
import os
import subprocess
import time
from typing import Any

import torch

from ...shm.segment import Segment
from ..device import cuda_words
from ..device.base import Word
from ..device.host_memory import TorchDevice
from .peer import FULL, KIND, PAYLOADS, STARTED, TINY
from .questions import GRACE_S, PROGRAM

_START_S = 60.0  # of a peer, on a busy machine
_SYNCHRONIZE_S = 20.0


def open_device(kind: str) -> tuple[TorchDevice, torch.device]:
    """The CPU device, or CUDA forced to one way; and where its tensors are."""
    if kind == "cpu":
        from ..device.cpu import CpuDevice

        return CpuDevice(), torch.device("cpu")
    from ..device.cuda import open_cuda_device
    from ..device.cuda_select import CudaOptions

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
        self.segment = Segment.create(self.sizes.segment_bytes, kind=KIND, backing="memfd")
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
        self.device.launch(self.main, lambda: fill(tensor, value))

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.device.synchronize(timeout_s=_SYNCHRONIZE_S)

    def start_peer(self, role: str, **options: Any) -> None:
        """Clear the words, start a process with one of ``_ROLES`` and wait until it is there."""
        for offset in range(0, STARTED + 1, 64):
            self.store(offset, 0)
        options |= {"parent": os.getpid(), "limit_s": self.left_s() + GRACE_S}
        options["is_tiny"] = self.sizes is TINY
        fd = self.segment.fd
        command = [*PROGRAM, "--peer", role, str(fd), json.dumps(options)]
        peer = self._peer = subprocess.Popen(command, pass_fds=(fd,))
        cuda_words.poll(lambda: self.load(STARTED) == 1 or peer.poll() is not None, _START_S)
        if self.load(STARTED) != 1:
            code = peer.poll()
            why = f"is not there after {_START_S:.0f} s" if code is None else f"ended with {code}"
            raise RuntimeError(f"the peer for {role} {why}")

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


def fill(tensor: torch.Tensor, value: int) -> None:
    """Fill it in place; what a launch calls."""
    tensor.fill_(value)
