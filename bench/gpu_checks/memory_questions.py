"""Questions 1, 2 and 8: registered memory, whether both sides see it, and Triton's use of it."""

import contextlib
import ctypes
import resource
import statistics
import time
from functools import partial
from typing import Any

import torch
from corun.gpu.device.base import DeviceError
from corun.gpu.device.host_memory import TorchDevice
from corun.shm.errors import ShmError
from corun.shm.segment import Segment

from gpu_checks import layout
from gpu_checks.figures import Figures
from gpu_checks.kernels import make_count
from gpu_checks.rig import Rig, open_device, use_rig

_MEMLOCK_BYTES = 8 << 20
_CAP_IPC_LOCK = 14
_NUM_COPIES = 7
_QUEUED_CYCLES = 100_000_000  # some 50 ms


def registration(kind: str, limit_s: float, figures: Figures) -> None:
    """Question 1: which segments can be registered, and are copies from them asynchronous?"""
    sizes = layout.TINY if kind == "cpu" else layout.FULL
    figures.put("memlock_limit_before", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    for memlock in ("as it is", "8 MiB"):
        if memlock == "8 MiB":
            hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
            soft = _MEMLOCK_BYTES if hard < 0 else min(_MEMLOCK_BYTES, hard)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
            _give_up_locking()
            figures.put("may_lock_without_limit", _may_lock_without_limit())
        for backing in ("memfd", "posix"):
            # More than the limit, so that one that holds shows.
            num_bytes = max(8 * sizes.async_copy_bytes, 2 << 20)
            try:
                segment = Segment.create(num_bytes, kind=layout.KIND, backing=backing)
            except ShmError as error:
                figures.put(f"{backing}, memlock {memlock}", {"skipped": str(error)})
                continue
            device = open_device(kind)
            found = _register(device, segment, sizes.async_copy_bytes, is_cuda=kind != "cpu")
            figures.put(f"{backing}, memlock {memlock}", found)
            device.close()
            segment.close()


def _may_lock_without_limit() -> bool:
    """Whether the process has the capability that lifts the limit: then it says nothing."""
    with open("/proc/self/status", encoding="ascii") as status:
        masks = [line.split()[1] for line in status if line.startswith("CapEff")]
    return bool(masks) and bool(int(masks[0], 16) >> _CAP_IPC_LOCK & 1)


def _give_up_locking() -> None:
    """Drop the capability that lifts the limit, so that the limit counts for root, too."""
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    masks = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their high halves
    if libc.capget(header, masks) == 0:
        masks[0] &= ~(1 << _CAP_IPC_LOCK)
        libc.capset(header, masks)


def _register(
    device: TorchDevice, segment: Segment, copy_bytes: int, *, is_cuda: bool
) -> dict[str, Any]:
    stream = device.stream("transfer")
    start_s = time.perf_counter()
    try:
        memory = device.register(segment.buffer, name=segment.backing)
    except DeviceError as error:
        return {"registered": False, "error": str(error)}
    register_ms = (time.perf_counter() - start_s) * 1e3
    host = memory.tensor(0, (copy_bytes,), torch.uint8)
    on_device = torch.ones(copy_bytes, dtype=torch.uint8, device="cuda" if is_cuda else "cpu")
    if is_cuda:
        torch.cuda.synchronize()
    call_us, were_queued = [], []
    for _ in range(_NUM_COPIES):
        event = device.event()
        # Something long is ahead: a copy that waits for it is not asynchronous.
        device.launch(stream, _busy_cuda if is_cuda else lambda: time.sleep(0.02))
        start_s = time.perf_counter()
        device.copy(stream, host, on_device)
        call_us.append((time.perf_counter() - start_s) * 1e6)
        device.record(stream, event)
        were_queued.append(not device.is_done(event))
        device.synchronize(timeout_s=10)
        device.release_event(event)
    found = {
        "registered": True,
        "by": device.choices.registration,
        "register_ms_per_gib": round(register_ms * 2**30 / segment.num_bytes, 1),
        "is_pinned": bool(host.is_pinned()) if is_cuda else None,
        "copy_bytes": copy_bytes,
        "copy_call_us": round(statistics.median(call_us), 1),
        "was_queued": all(were_queued),
        "copied": bool((host == 1).all()),
    }
    del host
    memory.close()
    return found


def _busy_cuda() -> None:
    torch.cuda._sleep(_QUEUED_CYCLES)


def coherence(kind: str, limit_s: float, figures: Figures) -> None:
    """Question 2: does each side see what the other writes after the mapping?"""
    use_rig(kind, limit_s, lambda rig: _coherence_with(rig, figures))


def _coherence_with(rig: Rig, figures: Figures) -> None:
    if not rig.is_tiny:
        from corun.gpu.device.cuda_driver import load_driver

        same = rig.memory.device_address == rig.memory.address
        figures.put("device_address_is_host_address", same)
        figures.put("can_use_host_pointers", load_driver().can_use_host_pointers(0))
    figures.put("num_rounds", rig.sizes.num_coherence_rounds)
    figures.put("wrong_words", _write_in_turn(rig))
    figures.put("planted_words", _plant(rig))


def _plant(rig: Rig) -> dict[str, int]:
    """The count of wrong words must see values that are wrong."""
    host, errors, count = rig.host(layout.X_OFFSET, 1024), rig.zeros(1), make_count(rig)
    rig.launch(rig.transfer, lambda: count(host, -7, errors))
    rig.synchronize()
    return {"planted": host.numel(), "found": int(errors.item())}


def _write_in_turn(rig: Rig) -> dict[str, int]:
    """The host writes and the device reads both ways, then the device writes and the host reads."""
    host, on_device = rig.host(layout.X_OFFSET, 1024), rig.zeros(1024)
    by_kernel, by_copy, on_host = rig.zeros(1), rig.zeros(1), 0
    count, stream = make_count(rig), rig.transfer
    for number in range(1, rig.sizes.num_coherence_rounds + 1):
        host.fill_(number)
        rig.launch(stream, partial(count, host, number, by_kernel))
        rig.device.copy(stream, on_device, host)
        rig.launch(stream, partial(count, on_device, number, by_copy))
        rig.synchronize()
        rig.launch(stream, partial(on_device.fill_, -number))
        rig.device.copy(stream, host, on_device)
        rig.synchronize()
        on_host += int((host != -number).sum())
    return {
        "kernel_reads_host": int(by_kernel.item()),
        "copy_to_device": int(by_copy.item()),
        "copy_to_host": on_host,
    }


def triton_arguments(kind: str, limit_s: float, figures: Figures) -> None:
    """Question 8: is registered memory an argument of kernels, and is what they read ever old?

    The worker overwrites one and the same payload in every round, with a wait between the write
    and the next kernel: a line that a cache kept would show.
    """
    use_rig(kind, limit_s, lambda rig: _triton_arguments_with(rig, figures))


def _triton_arguments_with(rig: Rig, figures: Figures) -> None:
    ways: dict[str, dict[str, bool]] = {
        "address": {},
        "tensor": {"by_tensor": True},
        "tensor, volatile": {"by_tensor": True, "is_volatile": True},
    }
    if rig.is_tiny:
        ways = {"address": {}}  # the CPU has one way
    for name, options in ways.items():
        try:
            found = _read_again(rig, options)
        except (TypeError, ValueError) as error:  # what a launcher says of a host tensor
            found = {"accepted": False, "error": str(error)}
            # The stream is marked as failed until this has raised it.
            with contextlib.suppress(DeviceError):
                rig.synchronize()
        figures.put(name, found)
        rig.stop_peers()


def _read_again(rig: Rig, options: dict[str, bool]) -> dict[str, Any]:
    num_rounds = rig.sizes.num_stale_rounds
    count = make_count(rig, **options)
    values, errors, planted = rig.host(layout.X_OFFSET, 1024), rig.zeros(1), rig.zeros(1)
    values.fill_(0)
    rig.launch(rig.transfer, lambda: count(values, 1, planted))  # compiles, and must find all wrong
    rig.synchronize()
    rig.start_peer("stale", num_rounds=num_rounds)
    ready, done = rig.word(layout.READY), rig.word(layout.DONE)
    for sequence in range(1, num_rounds + 1):
        rig.device.signal(rig.transfer, ready, sequence)
        rig.device.wait(rig.transfer, done, sequence)
        rig.launch(rig.transfer, partial(count, values, sequence, errors))
    rig.synchronize()
    return {
        "accepted": True,
        "num_launches": num_rounds,
        "stale_words": int(errors.item()),
        "planted": 1024,
        "found": int(planted.item()),
    }
