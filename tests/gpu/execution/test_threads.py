"""One thread is chosen where more do not help."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from corun.gpu.execution import threads
from corun.gpu.forward.kernel_threads import num_kernel_threads, set_kernel_threads
from corun.gpu.model.probe import ProbeRow
from corun.gpu.quiet_time import Sample


class FakeRunner:
    """A model with given step times by number of threads, on its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ms: dict[int, tuple[float, float]]) -> None:
        self._ms = ms
        self._now_s = 0.0
        self.num_threads = 0
        monkeypatch.setattr(threads, "set_threads", self._set_threads)
        monkeypatch.setattr("time.perf_counter", lambda: self._now_s)

    def _set_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def probe_step(self, rows: Sequence[ProbeRow]) -> None:
        decode_ms, prefill_ms = self._ms[self.num_threads]
        self._now_s += (decode_ms if len(rows[0].token_ids) == 1 else prefill_ms) * 1e-3


@pytest.mark.parametrize(
    ("one", "many", "chosen"),
    [
        ((1.0, 1.0), (5.0, 5.0), 1),  # barriers cost more than the threads gain
        ((1.05, 1.05), (1.0, 1.0), 1),  # as good as all
        ((10.0, 20.0), (6.0, 10.0), 4),
        ((1.0, 20.0), (1.0, 10.0), 4),  # prefill gains
        ((2.0, 10.0), (1.0, 10.0), 4),  # decode gains
    ],
)
def test_chooses(
    monkeypatch: pytest.MonkeyPatch, one: tuple[float, float], many: tuple[float, float], chosen: int
) -> None:
    runner = FakeRunner(monkeypatch, {1: one, 4: many})
    assert threads.choose_threads(runner, 4, 2**20) == chosen  # type: ignore[arg-type]
    assert runner.num_threads == chosen


def test_a_large_model_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(monkeypatch, {})
    assert threads.choose_threads(runner, 4, 2**30) == 4  # type: ignore[arg-type]
    assert runner.num_threads == 4


def test_a_single_cpu_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(monkeypatch, {})
    assert threads.choose_threads(runner, 1, 2**20) == 1  # type: ignore[arg-type]
    assert runner.num_threads == 1


def test_noise_takes_all_threads_and_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = FakeRunner(monkeypatch, {1: (1.0, 1.0), 4: (5.0, 5.0)})
    limits_s = []

    def take_samples(call: object, num_quiet: int, limit_s: float) -> list[Sample]:
        limits_s.append(limit_s)
        return [Sample(19.967e-3, 19.9e-3), Sample(20.016e-3, 19.9e-3)]

    monkeypatch.setattr(threads, "take_samples", take_samples)
    kept = tmp_path / "choice.json"
    assert threads.choose_threads(runner, 4, 2**20, kept) == 4  # type: ignore[arg-type]
    assert runner.num_threads == 4
    assert not kept.exists()
    assert len(limits_s) == 1, "the other measurements could not change the choice"


@pytest.mark.parametrize("chosen", [1, 4])
def test_a_quiet_choice_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: int) -> None:
    kept = tmp_path / "choices" / "choice.json"
    runner = FakeRunner(monkeypatch, {chosen: (1.0, 1.0), 5 - chosen: (5.0, 5.0)})
    assert threads.choose_threads(runner, 4, 2**20, kept) == chosen  # type: ignore[arg-type]
    again = FakeRunner(monkeypatch, {})
    assert threads.choose_threads(again, 4, 2**20, kept) == chosen  # type: ignore[arg-type]
    assert again.num_threads == chosen
    kept.write_text("3")  # another number would have been neither
    runner = FakeRunner(monkeypatch, {chosen: (1.0, 1.0), 5 - chosen: (5.0, 5.0)})
    assert threads.choose_threads(runner, 4, 2**20, kept) == chosen  # type: ignore[arg-type]


def test_kernel_threads_are_of_the_thread_that_sets_them() -> None:
    before = num_kernel_threads()
    with ThreadPoolExecutor(1) as other:
        other.submit(set_kernel_threads, 1).result()
        assert other.submit(num_kernel_threads).result() == 1
    assert num_kernel_threads() == before
