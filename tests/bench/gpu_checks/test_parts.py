"""Parts of the questions to a GPU: what is refused, words, payloads behind their flags."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.gpu.device.base import DeviceError, Stream
from corun.gpu.device.cpu import CpuDevice
from gpu_checks import graphs, layout, ordering, rig
from gpu_checks.figures import Figures
from gpu_checks.peer import CompiledWords, PolledWords, choose_words
from gpu_checks.verdicts import verdict_of


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_cuda_refuses_to_capture_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    modes = []

    @contextmanager
    def capture(graph: object, *, stream: object, capture_error_mode: str) -> Iterator[None]:
        modes.append(capture_error_mode)
        yield
        if is_refused:
            raise RuntimeError("the capture is invalid")

    def enqueue() -> None:
        if is_refused:
            raise DeviceError("cuStreamWaitValue32 is not permitted")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    said = graphs._capture(None, enqueue)  # type: ignore[arg-type]
    refusals = "cuStreamWaitValue32 is not permitted; the capture is invalid"
    assert said == (refusals if is_refused else None)
    assert modes == ["thread_local"]


@pytest.mark.usefixtures("bench_importable")
@pytest.mark.parametrize(("words", "expected"), [("auto", "compiled"), ("polled", "polled")])
def test_a_worker_answers_with_and_without_compiled_words(words: str, expected: str) -> None:
    def work(made: rig.Rig) -> None:
        made.start_peer("echo", num_rounds=3, words=words)
        assert made.peer_words.startswith(expected)
        for sequence in (1, 2, 3):
            made.device.signal(made.transfer, made.word(layout.READY), sequence)
            made.device.wait(made.transfer, made.word(layout.DONE), sequence)
        made.synchronize()
        assert made.load(layout.DONE) == 3

    rig.use_rig("cpu", 30.0, work)


def test_polled_words_are_taken_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_words("auto"), CompiledWords)
    monkeypatch.setattr(CompiledWords, "__init__", _raise_import_error)
    words = choose_words("auto")
    assert isinstance(words, PolledWords)
    value = torch.zeros(1, dtype=torch.int32)
    assert not words.spin(value.data_ptr(), 5, 0.001)
    words.store(value.data_ptr(), 5)
    assert words.load(value.data_ptr()) == 5
    assert words.spin(value.data_ptr(), 5, 0.001)


def _raise_import_error(_: object) -> None:
    raise ImportError("no numba")


class _FlagFirst(CpuDevice):
    """A device whose copies come after the signals that were enqueued behind them."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[tuple[Stream, torch.Tensor, torch.Tensor]] = []

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._late.append((stream, destination, source))

    def signal(self, stream: Stream, word: Any, value: int) -> None:
        super().signal(stream, word, value)
        self.launch(stream, lambda: time.sleep(0.002))
        self._copy_late()

    def synchronize(self, stream: Stream | None = None, *, timeout_s: float) -> None:
        self._copy_late()
        super().synchronize(stream, timeout_s=timeout_s)

    def _copy_late(self) -> None:
        while self._late:
            super().copy(*self._late.pop(0))


@pytest.mark.usefixtures("bench_importable")
def test_the_ordering_question_finds_a_flag_before_its_payload(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rig, "open_device", lambda kind: _FlagFirst())
    figures = Figures(tmp_path / "figures")
    ordering.ordering("cpu", 60.0, figures)
    to_worker = figures.values["so_far"]["to_worker"]
    assert to_worker["wrong_words"] > to_worker["planted"]
    assert "wrong words to_worker" in verdict_of("4", {"cpu": figures.values}, {"cpu": "answered"})


def test_a_million_rounds_are_mostly_small_and_slots_do_not_overlap() -> None:
    sizes = [layout.payload_bytes(s, is_tiny=False) for s in range(1, 100_001)]
    assert {4 << 10, 64 << 10, 512 << 10, 2 << 20} == set(sizes)
    assert sizes.count(4 << 10) > 0.9 * len(sizes)
    assert 10 * sum(sizes) < 32 << 30  # both ways in a second or two of any link
    for is_tiny in (False, True):
        assert max(sizes if not is_tiny else [8 << 10]) <= layout.slot_bytes(is_tiny=is_tiny)
        assert layout.segment_bytes(is_tiny=is_tiny) % 4096 == 0
    assert layout.STAMPS_OFFSET + 8 * layout.MAX_STAMPS <= layout.X_OFFSET
    assert layout.STARTED + 64 <= layout.STAMPS_OFFSET
    rounds = layout.FULL.num_batches * layout.FULL.batch_rounds
    assert 2 * rounds <= layout.MAX_STAMPS
