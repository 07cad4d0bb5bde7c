"""Replayed decode passes give the modules' own bits, and others are not replayed."""

import logging
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from corun.gpu.execution.runner import ModelRunner
from corun.gpu.forward.batch import DeltaPass
from corun.gpu.forward.kernel_threads import num_kernel_threads, set_kernel_threads
from corun.gpu.lora.deltas import ResidentDeltas
from corun.gpu.replay.decode_graphs import DecodeGraphs
from support.architectures import ARCHITECTURES, save_model
from support.decode_passes import DecodePasses


class AskedPass:
    """A pass with deltas that the graph must call for each time; see ``DeltaPass``."""

    is_repeatable = False
    has_factors = False

    def __init__(self, inner: DeltaPass) -> None:
        self._inner = inner
        self.num_asked = 0

    def begin(self, group: Hashable, x: torch.Tensor) -> None:
        """Nothing yet."""

    def add(
        self, group: Hashable, x: torch.Tensor, ys: Sequence[torch.Tensor], target_indices: Sequence[int]
    ) -> None:
        """What the inner pass adds."""
        self.num_asked += 1
        self._inner.add(group, x, ys, target_indices)


# Which of its rotary embeddings is taken depends on the lengths of requests.
NOT_CAPTURED = {"phi3-longrope"}
# Replayed in every run; the other architectures only with --full.
OFTEN = {
    "bfloat16": {"llama3-rope", "gemma3", "phi3-longrope", "cohere", "starcoder2", "mixtral"},
    "float32": {"llama3-rope", "gemma2", "gpt-neox", "mixtral"},
}


def graphs_of(runner: ModelRunner) -> DecodeGraphs:
    assert runner.graphs is not None
    return runner.graphs


class Pair:
    """The same passes on two copies of a model, one of which replays."""

    def __init__(self, directory: Path, dtype: str) -> None:
        replaying = DecodePasses(directory, dtype=dtype)
        self.both = [replaying, DecodePasses(directory, dtype=dtype, decode_graphs="off")]
        self.graphs = graphs_of(replaying.runner)

    def start(self, *rows: tuple[int, int, int]) -> None:
        """Compute prompts of requests (number, table row, rank)."""
        self.requests = [
            {number: passes.start(number, table_row, rank) for number, table_row, rank in rows}
            for passes in self.both
        ]

    def decode(self, *numbers: int, order: list[int] | None = None) -> torch.Tensor:
        """Decode requests; both copies must give the same bits."""
        replayed, expected = (
            passes.decode([requests[number] for number in numbers], order)
            for passes, requests in zip(self.both, self.requests, strict=True)
        )
        assert torch.equal(replayed, expected)
        return replayed


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(save_model("llama3-rope", tmp_path), "bfloat16")
    yield pair
    for passes in pair.both:
        passes.close()


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in names else pytest.mark.full)
        for dtype, names in OFTEN.items()
        for name in ARCHITECTURES
    ],
)
def test_logits_keep_their_bits(
    architecture: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(save_model(architecture, tmp_path), dtype)
    for passes in pair.both:
        rows = [passes.add_adapter(4), passes.add_adapter(24, every=2)]
    pair.start((0, -1, 0), (1, rows[0], 4), (2, rows[1], 24))
    for _ in range(5):
        pair.decode(0, 1, 2)
        pair.decode(2)
    for _ in range(4):
        pair.decode(0)
    is_captured = architecture not in NOT_CAPTURED
    assert pair.graphs.num_verified == (3 if is_captured else 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("decode graphs: off" in text for text in warnings) == (0 if is_captured else 1)
    for passes in pair.both:
        passes.close()


def test_every_number_of_rows_and_adapters_that_come_and_go(llama: Pair) -> None:
    """Adapters arrive, are evicted, and others take their rows; requests end and begin."""
    for passes in llama.both:
        rows = [passes.add_adapter(8), passes.add_adapter(8)]
    llama.start((0, -1, 0), (1, rows[0], 8), (2, rows[1], 8), (3, rows[0], 8), (4, -1, 0))
    for numbers in ((0, 1, 2), (4, 2), (3, 1, 0), (0, 4), (2,)) * 4:
        llama.decode(*numbers)
    before = llama.graphs.num_verified
    for passes, requests in zip(llama.both, llama.requests, strict=True):
        passes.loaded.lora_table.remove(rows[1])
        assert passes.add_adapter(40, every=3) == rows[1]
        requests[2].rank = 40
    for numbers in ((0, 1, 2), (3, 1, 0), (2,)):
        llama.decode(*numbers)
    assert llama.graphs.num_verified == before > 0


def test_an_adapter_of_embedding_and_head_is_another_graph(llama: Pair) -> None:
    for passes in llama.both:
        rows = [passes.add_adapter(8, is_inside=True), passes.add_adapter(8)]
        table = passes.loaded.lora_table
        assert [table.has_head([row]) for row in rows] == [False, True]
        assert [table.has_embedding([row]) for row in rows] == [False, True]
    llama.start((0, rows[0], 8), (1, rows[1], 8))
    for number in (0, 0, 0, 0, 1, 1, 1, 1, 0):
        llama.decode(number)
    assert llama.graphs.num_verified == 2


def test_contexts_grow_over_many_blocks(llama: Pair) -> None:
    """Work is cut differently as contexts grow; replays follow."""
    llama.start((0, -1, 0), (1, -1, 0))
    for _ in range(36):
        llama.decode(0, 1)
    assert llama.graphs.num_verified == 1


def test_prefill_and_chunks_between_leave_graphs_right(llama: Pair) -> None:
    llama.start((0, -1, 0), (1, -1, 0))
    for _ in range(4):
        llama.decode(0, 1)
        for passes in llama.both:
            passes.start(5, prompt=11)
        llama.decode(1, 0)
    assert llama.graphs.num_verified == 1


def test_logits_in_another_order_are_not_those_of_a_graph(llama: Pair) -> None:
    """A pass with scores of a prompt has the logits of sampling rows first."""
    llama.start((0, -1, 0), (1, -1, 0), (2, -1, 0))
    for _ in range(4):
        llama.decode(0, 1, 2)
    assert llama.graphs.num_verified == 1
    llama.decode(0, 1, 2, order=[1, 2, 0])


def test_deltas_of_others_are_asked_for_in_every_replay(llama: Pair) -> None:
    """Their pass is captured only after a pass with this number of rows was verified."""
    for passes in llama.both:
        row = passes.add_adapter(8)
    llama.start((0, row, 8), (1, row, 8))

    def decode_with_others() -> None:
        asked = []
        logits = []
        for passes, requests in zip(llama.both, llama.requests, strict=True):
            inputs = passes.decode_inputs([requests[0], requests[1]])
            assert inputs.lora is not None
            deltas = AskedPass(ResidentDeltas(passes.loaded.lora_backend, inputs.lora))
            logits.append(passes.runner.forward(inputs, deltas))
            asked.append(deltas.num_asked)
        assert torch.equal(*logits)
        assert asked[0] == asked[1] > 0

    decode_with_others()
    assert llama.graphs.num_verified == 0
    for _ in range(3):
        llama.decode(0, 1)
    assert llama.graphs.num_verified == 1
    for _ in range(4):
        decode_with_others()
        llama.decode(1, 0)
    assert llama.graphs.num_verified == 2


def test_another_number_of_threads_is_another_graph(llama: Pair) -> None:
    llama.start((0, -1, 0))
    before = num_kernel_threads()
    try:
        for num_threads in (2, 1):
            set_kernel_threads(num_threads)
            for _ in range(4):
                llama.decode(0)
    finally:
        set_kernel_threads(before)
    assert llama.graphs.num_verified == 2


def test_a_replay_that_differs_turns_graphs_off(
    llama: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that computes with a Python value that changes from pass to pass."""
    llama.start((0, -1, 0))
    for passes in llama.both:
        norm = passes.runner.model.model.norm
        scale = iter(range(2, 100))
        forward = norm.forward
        monkeypatch.setattr(norm, "forward", lambda x, scale=scale, forward=forward: forward(x) * next(scale))
    with caplog.at_level(logging.WARNING, logger="corun"):
        for _ in range(6):
            llama.decode(0)
    assert llama.graphs.num_verified == 0
    assert "other logits" in caplog.text
    assert "please report" in caplog.text
