"""Decode passes that are padded for CUDA graphs give what the modules give."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from corun.gpu.forward.batch import AttentionMetadata, PassMetadata
from corun.gpu.replay.cuda_graphs import CudaGraph, CudaGraphs
from corun.gpu.replay.decode_graphs import PassInputs
from support.architectures import save_model
from support.triton.program import run_triton_program


@pytest.mark.parametrize("architecture", ["llama3-rope", pytest.param("gemma2", marks=pytest.mark.full)])
def test_padded_passes_in_the_interpreter(architecture: str, tmp_path: Path) -> None:
    run_triton_program("check_graphs", str(save_model(architecture, tmp_path)), "cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama3-rope", "gemma2", "mixtral"])
def test_graphs_on_a_gpu(architecture: str, tmp_path: Path) -> None:
    run_triton_program("check_graphs", str(save_model(architecture, tmp_path)), "cuda")


class Recorder:
    """Records nothing; ``error``: of the recording."""

    def __init__(self, *, error: Exception | None = None, is_full: bool = False) -> None:
        self._error, self._is_full = error, is_full

    def has_room(self) -> bool:
        return not self._is_full

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        if self._error is not None:
            raise self._error
        return lambda: None


class Pass:
    """A pass of three rows; its logits are the ids, and ``max_rows`` fit the device."""

    def __init__(self, max_rows: int = 1000) -> None:
        self.ids = torch.tensor([[5, 6, 7]])
        self.max_rows = max_rows
        rows = torch.arange(4, dtype=torch.int32)
        attention = AttentionMetadata(
            query_starts=rows,
            context_lens=torch.full((3,), 9, dtype=torch.int32),
            block_tables=torch.zeros(3, 3, dtype=torch.int32),
            slot_mapping=torch.arange(3),
            query_starts_host=(0, 1, 2, 3),
            context_lens_host=(9, 9, 9),
            max_query_len=1,
            min_query_len=1,
            max_context_len=9,
            block_size=4,
        )
        self.metadata = PassMetadata(attention, None, None, most_context_len=40)

    def run(self, inputs: PassInputs) -> torch.Tensor:
        """See ``RunPass``."""
        if inputs.input_ids.shape[1] > self.max_rows:
            raise torch.OutOfMemoryError
        return inputs.input_ids[:, :, None].to(torch.float32)

    def capture(self, graphs: CudaGraphs) -> CudaGraph | str | None:
        """Capture it, and compare the logits."""
        logits, graph = graphs.capture(
            self.run, PassInputs(self.ids, self.ids, torch.arange(3), self.metadata)
        )
        assert logits.flatten().tolist() == [5, 6, 7]
        return graph


def test_what_has_no_room_runs_the_modules_and_keeps_the_graphs_that_are_there() -> None:
    one = Pass()
    roomy, full = CudaGraphs(None, Recorder()), CudaGraphs(None, Recorder(is_full=True))
    assert isinstance(one.capture(roomy), CudaGraph)
    assert roomy.kind(3, one.metadata) is not None
    assert one.capture(full) is None
    assert full.kind(3, one.metadata) is None


@pytest.mark.parametrize("where", ["padded pass", "recording"])
def test_memory_that_only_a_graph_lacks_is_no_error_of_the_pass(where: str) -> None:
    error = torch.OutOfMemoryError() if where == "recording" else None
    one = Pass(max_rows=3 if error is None else 4)
    graphs = CudaGraphs(None, Recorder(error=error))
    assert one.capture(graphs) is None
    assert graphs.kind(3, one.metadata) is None


def test_a_pass_that_waits_for_the_device_is_not_captured() -> None:
    refused = Pass().capture(CudaGraphs(None, Recorder(error=RuntimeError("it is synchronous"))))
    assert isinstance(refused, str)
    assert "it is synchronous" in refused
