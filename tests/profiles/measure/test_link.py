"""The measured link has the pace of the options; marks on streams give the times."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from corun.gpu.device.select import DeviceOptions, make_device
from corun.profiles.link import Direction
from corun.profiles.measure import link
from corun.profiles.measure.link import LinkBench, LinkTimes
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
    # Never faster than its pace; how much slower depends on other programs.
    copy_s = times.model.latency_s + 2**20 / times.model.bytes_per_s
    assert copy_s > 500e-6 + 2**20 / (0.55 * 2**30)
    for point in times.points:
        num_bytes = point.chunk_bytes * point.concurrency
        assert num_bytes / point.bytes_per_s > 500e-6 + num_bytes / (0.55 * 2**30)
    assert [(p.chunk_bytes, p.concurrency) for p in times.points] == [
        (2**18, 1),
        (2**18, 2),
        (2**20, 1),
        (2**20, 2),
    ]


class CountedCopies:
    """A stopwatch that shows the nominal time of the copies so far."""

    def __init__(self, device: Any, *, byte_s: float, copy_s: float, disturbed_s: float = 0.0) -> None:
        self.num_copies = 0
        self._device = device
        self._byte_s = byte_s
        self._copy_s = copy_s
        self._disturbances_s = itertools.cycle((0.0, 0.0, 0.0, disturbed_s))
        begin = device.link.begin

        def count(*arguments: Any, **named: Any) -> Any:
            self.num_copies += 1
            return begin(*arguments, **named)

        device.link.begin = count

    @property
    def num_bytes(self) -> int:
        num_bytes: int = self._device.link.stats(Direction.TO_DEVICE).num_bytes
        return num_bytes

    def mark(self) -> float:
        return self._byte_s * self.num_bytes + self._copy_s * self.num_copies

    def synchronize(self) -> None:
        """All marks have their times."""

    def between_s(self, first: float, then: float) -> float:
        return then - first + next(self._disturbances_s)


Measure = Callable[..., tuple[LinkTimes, CountedCopies]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measure]:
    """Measures memory as a link by a stopwatch of its own; two rounds and a warm-up."""
    device = make_device(_CPU, DeviceOptions())

    def measure(*concurrency: int, **seconds: float) -> tuple[LinkTimes, CountedCopies]:
        watch = CountedCopies(device, **seconds)
        monkeypatch.setattr(link, "stopwatch_of", lambda where: watch)
        bench = LinkBench(device, _CPU, concurrency)
        return bench.measure((2**20, 2**22), Repeats(0.5, 2, 2), lambda *_: None), watch

    yield measure
    device.close()


def test_copies_are_timed_by_marks_around_many_bytes(measure: Measure) -> None:
    """The host's time for enqueuing and polling does not count."""
    times, watch = measure(1, 2, byte_s=2.0**-30, copy_s=2.0**-16)
    assert times.model.bytes_per_s == pytest.approx(2**30)
    assert times.model.latency_s == pytest.approx(2.0**-16)
    single_s = 2.0**-10 + 2.0**-16
    assert [point.bytes_per_s for point in times.points[:2]] == pytest.approx([2**20 / single_s] * 2)
    assert times.left_out == ()
    assert watch.num_bytes >= 4 * 3 * 64 * 2**20


def test_a_link_on_which_size_costs_nothing_is_told(
    measure: Measure, caplog: pytest.LogCaptureFixture
) -> None:
    """Other programs may take longer than the copies: a profile is still made."""
    times, _ = measure(1, byte_s=0.0, copy_s=2.0**-17)
    assert "larger copies take no longer on the link (1048576 bytes 7.63 us" in caplog.text
    assert times.model.latency_s == 0.0
    assert times.model.bytes_per_s == pytest.approx(2**22 / 2.0**-17)


def test_what_disturbs_a_copy_once_does_not_slow_the_link(measure: Measure) -> None:
    times, _ = measure(1, byte_s=2.0**-30, copy_s=2.0**-16, disturbed_s=1.0)
    assert times.model.bytes_per_s == pytest.approx(2**30)


def test_memory_is_a_link_without_pacing() -> None:
    device = make_device(_CPU, DeviceOptions())
    try:
        bench = LinkBench(device, _CPU, (1,))
        times = bench.measure((2**16, 2**20), _REPEATS, lambda *_: None)
    finally:
        device.close()
    assert times.model.bytes_per_s > 0.0
    assert times.left_out == ()
