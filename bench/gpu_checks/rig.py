"""One question's equipment: a device forced to one way of signalling, a segment, and its peers.

``kind`` says how the device signals and waits: ``stream-op`` or ``triton`` on CUDA, ``cpu`` for the
CPU device, which runs the control flow with tiny sizes.
"""

import gc
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from corun.gpu.device import cuda_words
from corun.gpu.device.base import Stream, Word
from corun.gpu.device.host_memory import TorchDevice
from corun.shm.segment import Segment

from gpu_checks import layout, peer

_PEER_START_S = 30.0
_SYNCHRONIZE_S = 20.0


def open_device(kind: str) -> TorchDevice:
    """The CPU device, or CUDA with signal and wait forced to ``kind``."""
    if kind == "cpu":
        from corun.gpu.device.cpu import CpuDevice

        return CpuDevice()
    from corun.gpu.device.cuda import open_cuda_device
    from corun.gpu.device.cuda_select import CudaOptions

    # Longer than any question, so that a wait that gives up is never what is measured.
    return open_cuda_device(CudaOptions(signal=kind, wait=kind, wait_timeout_s=120.0))


class Rig:
    """A device with three streams, and a registered segment laid out as ``layout`` says."""

    def __init__(self, kind: str, limit_s: float) -> None:
        self.kind = kind
        self.is_tiny = kind == "cpu"
        self.sizes = layout.TINY if self.is_tiny else layout.FULL
        self.torch_device = torch.device("cpu" if self.is_tiny else "cuda")
        self.deadline_s = time.monotonic() + limit_s
        self.segment = Segment.create(
            layout.segment_bytes(is_tiny=self.is_tiny), kind=layout.KIND, backing="memfd"
        )
        self.device = open_device(kind)
        self.transfer = self.device.stream("transfer", is_urgent=True)
        self.compute = self.device.stream("compute")
        self.load_stream = self.device.stream("load")
        self.memory = self.device.register(self.segment.buffer, name="check")
        self._peers: list[subprocess.Popen[bytes]] = []

    def left_s(self) -> float:
        """Seconds until the question should have ended."""
        return self.deadline_s - time.monotonic()

    def word(self, offset: int) -> Word:
        """A word of the segment, for the device."""
        return self.memory.word(offset, f"word {offset // 64}")

    def load(self, offset: int) -> int:
        """A word, as this process sees it."""
        return cuda_words.load(self.memory.address + offset)

    def store(self, offset: int, value: int) -> None:
        """Store to a word of this process, or to any while no peer runs."""
        cuda_words.store(self.memory.address + offset, value)

    def host(self, offset: int, num_words: int) -> torch.Tensor:
        """int32 [num_words] of the segment. To be dropped before ``close``."""
        return self.memory.tensor(offset, (num_words,), torch.int32)

    def zeros(self, num_words: int) -> torch.Tensor:
        """int32 [num_words] on the device, there before this returns."""
        made = torch.zeros(num_words, dtype=torch.int32, device=self.torch_device)
        if made.is_cuda:
            torch.cuda.synchronize()
        return made

    def launch(self, stream: Stream, compute: Callable[[], object]) -> None:
        """Enqueue a computation whatever it returns."""

        def run() -> None:
            compute()

        self.device.launch(stream, run)

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for a stream, or all."""
        self.device.synchronize(stream, timeout_s=_SYNCHRONIZE_S)

    def start_peer(self, role: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Clear the words, start a peer and wait until it is there."""
        for offset in range(0, layout.STARTED + 1, 64):
            self.store(offset, 0)
        options = {
            "parent": os.getpid(),
            "limit_s": max(self.left_s(), 1.0) + 30,
            "is_tiny": self.is_tiny,
            **options,
        }
        fd = self.segment.fd
        process = subprocess.Popen(peer.command(role, fd, options), pass_fds=(fd,))
        self._peers.append(process)
        self.until(lambda: self.load(layout.STARTED) == 1, f"peer {role}", _PEER_START_S, process)
        return process

    def until(
        self,
        is_so: Callable[[], bool],
        what: str,
        timeout_s: float = 10.0,
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> float:
        """Wait for something; returns how long. Raises TimeoutError, also if ``process`` ended."""
        start_s = time.monotonic()

        def is_over() -> bool:
            return is_so() or (process is not None and process.poll() is not None)

        if not cuda_words.poll(is_over, timeout_s) or not is_so():
            raise TimeoutError(f"{what}: not there after {time.monotonic() - start_s:.1f} s")
        return time.monotonic() - start_s

    @property
    def peer_words(self) -> str:
        """How the peer reads words, for the report."""
        return {1: "polled by Python, numba does not work", 2: "compiled"}[
            self.load(layout.COMPILED)
        ]

    def stop_peers(self) -> None:
        """End peers that have not ended by themselves."""
        for process in self._peers:
            process.kill()
            process.wait()
        self._peers.clear()

    def close(self) -> None:
        """Everything, in order; raises if memory is still in use."""
        self.stop_peers()
        self.synchronize()
        self.memory.close()
        self.device.close()
        self.segment.close()


def use_rig(kind: str, limit_s: float, work: Callable[[Rig], None]) -> None:
    """Run ``work`` with a rig and close it when the tensors of ``work`` are gone.

    After an error only peers are ended and waits released: the process ends next.
    """
    rig = Rig(kind, limit_s)
    try:
        work(rig)
    except BaseException:
        rig.stop_peers()
        rig.device.release_waits()
        raise
    gc.collect()
    rig.close()
