"""The link that is measured is the one that the options pace."""

import torch
from corun.gpu.device.select import DeviceOptions, make_device
from corun.profiles.measure.link import LinkBench
from corun.profiles.rounds import Repeats

_CPU = torch.device("cpu")
_REPEATS = Repeats(0.5, 2, 3)


def test_a_paced_link_is_found_again() -> None:
    device = make_device(_CPU, DeviceOptions(link_gib_per_s=0.5, link_latency_us=500.0))
    try:
        bench = LinkBench(device, _CPU, (1, 2))
        times = bench.measure((2**18, 2**20), _REPEATS, lambda *_: None)
    finally:
        device.close()
    # Never faster than it is paced; how much slower depends on who else computes.
    copy_s = times.model.latency_s + 2**20 / times.model.bytes_per_s
    assert copy_s > 500e-6 + 2**20 / (0.55 * 2**30)
    assert times.model.latency_s > 1e-4
    assert [(p.chunk_bytes, p.concurrency) for p in times.points] == [
        (2**18, 1), (2**18, 2), (2**20, 1), (2**20, 2),
    ]  # fmt: skip
    assert all(point.bytes_per_s < 0.55 * 2**30 for point in times.points)


def test_memory_is_a_link_without_pacing() -> None:
    device = make_device(_CPU, DeviceOptions())
    try:
        bench = LinkBench(device, _CPU, (1,))
        times = bench.measure((2**16, 2**20), _REPEATS, lambda *_: None)
    finally:
        device.close()
    assert times.model.bytes_per_s > 0.0
    assert times.left_out == ()
