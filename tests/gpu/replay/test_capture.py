"""Captured passes compute the same on other inputs; those that could not are refused by name."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from corun.cpu_workers.kernels.simd.isa import has_matrix_registers, process_isa
from corun.cpu_workers.kernels.simd.layout import BFLOAT16, BFLOAT16_DOT, BFLOAT16_TILES
from corun.gpu.forward.batch import PassMetadata
from corun.gpu.forward.launcher import Launcher, current_launcher
from corun.gpu.forward.lower import BlockTables, PackedRows, lower
from corun.gpu.fused import residual
from corun.gpu.linear.numba_backend import NumbaLinear
from corun.gpu.linear.quantized import quantize
from corun.gpu.linear.quantized_linear import PackedWeight, QuantizedLinear
from corun.gpu.replay.capture import OutputMemory, capture_pass
from corun.gpu.replay.captured_pass import CapturedPass, KernelCalls

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def metadata() -> PassMetadata:
    one = np.ones(1, np.int64)
    tables = BlockTables(np.zeros((1, 1), np.int32), torch.device("cpu"))
    rows = PackedRows(one, one, one, tables, np.arange(1), (2,), (-1,), (0,))
    return PassMetadata(lower(rows, 4, torch.device("cpu")).attention, None, None)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor([values])


def capture(run: Run) -> CapturedPass | str:
    """Capture a pass and check that its result is the function's."""
    first, second = ids(1, 2, 3), ids(4, 5, 6)
    with torch.inference_mode():
        logits, graph = capture_pass(run, first, second)
        if not isinstance(graph, str):
            assert torch.equal(logits, run(first, second))
    return graph


def replay(graph: CapturedPass, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return graph.replay(first, second, metadata()).clone()


def check(run: Run) -> CapturedPass:
    """A replay gives what the function gives."""
    graph = capture(run)
    assert isinstance(graph, CapturedPass)
    for first, second in ((ids(7, 8, 9), ids(1, 0, 5)), (ids(0, 0, 1), ids(2, 2, 2))):
        with torch.inference_mode():
            expected = run(first, second)
        assert torch.equal(replay(graph, first, second), expected)
    return graph


def test_views_copies_and_writes_in_place() -> None:
    weights = torch.randn(10, 4)

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = weights[a]  # a new tensor
        parts = rows.transpose(1, 2).split(2, dim=1)  # views
        total = torch.zeros(1, 2, 3)
        total += parts[0]
        total.mul_(2)
        total[:, 0] = b.float()
        values, places = torch.cat([total, parts[1]], dim=1).max(dim=1)  # two new tensors
        return values + places + torch.empty(3).fill_(1)

    check(run)


def test_kernels_and_operations_in_their_order() -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = a.bfloat16(), b.bfloat16()
        for _ in range(3):
            x = residual.add(x, y)
            y = x + y  # of torch; a sum of this kind becomes a kernel
        return torch.cos(residual.add(x, y))

    graph = check(run)
    kernels = [part.num_calls for part in graph.parts if isinstance(part, KernelCalls)]
    assert kernels == [7]


@pytest.mark.parametrize("tag", [BFLOAT16, BFLOAT16_DOT, BFLOAT16_TILES], ids=lambda tag: tag.dtype.name)
def test_linears_of_each_arithmetic_are_captured(tag: np.generic) -> None:
    """For each back end, not only the machine's choice."""
    if tag is BFLOAT16_DOT and not process_isa().has_bfloat16_dot:
        pytest.skip("this process has no AVX512_BF16")
    if tag is BFLOAT16_TILES and not has_matrix_registers():
        pytest.skip("this process has no matrix registers")
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(10, 64, generator=generator).bfloat16()
    linear = NumbaLinear(torch.randn(64, 64, generator=generator).bfloat16(), None, tag=tag)

    def run(first: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return linear(torch.nn.functional.embedding(first, embedding))

    graph = capture(run)
    assert isinstance(graph, CapturedPass), graph


@pytest.mark.parametrize("bits", [8, 4])
def test_linears_with_quantised_weights_are_captured(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(10, 64, generator=generator).bfloat16()
    weight = quantize(torch.randn(64, 64, generator=generator), bits)
    linear = QuantizedLinear(PackedWeight.of(weight), None)

    def run(first: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return linear(torch.nn.functional.embedding(first, embedding))

    check(run)


def test_memory_of_outputs_is_used_again_when_nothing_refers_to_it() -> None:
    memory = OutputMemory()
    first = memory.tensor((3, 5), torch.bfloat16)
    assert first.shape == (3, 5) and first.dtype == torch.bfloat16
    assert first.data_ptr() % 64 == 0
    address = first.data_ptr()
    part = first[1:].transpose(0, 1)
    del first
    assert memory.tensor((15,), torch.int16).data_ptr() != address  # the part still refers to it
    del part
    assert memory.tensor((5, 3), torch.int16).data_ptr() == address
    assert memory.tensor((5, 3), torch.float32).data_ptr() != address  # another size


def test_callbacks_run_in_every_replay_and_are_not_looked_into() -> None:
    seen = []

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = a.bfloat16()

        def callback() -> None:
            assert type(current_launcher()) is Launcher
            seen.append(x.tolist())
            x.mul_(2)

        current_launcher().call_in_every_pass(callback)
        return x + 1

    with torch.inference_mode():
        logits, graph = capture_pass(run, ids(1, 2, 3), ids(4, 5, 6))
    assert isinstance(graph, CapturedPass)
    assert logits.tolist() == [[3, 5, 7]]
    assert replay(graph, ids(3, 4, 5), ids(0, 0, 0)).tolist() == [[7, 9, 11]]
    assert seen == [[[1, 2, 3]], [[3, 4, 5]]]


def launch_with_text(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    current_launcher().launch(lambda text: None, "x")
    return a


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda a, b: a[a > 1], "dynamic_output_shape"),
        (lambda a, b: torch.nonzero(a), "dynamic_output_shape"),
        (lambda a, b: a + int(b[0, 0]), "data_dependent_output"),
        (lambda a, b: a if torch.max(b) > 3 else b, "returns bool"),
        (lambda a, b: a + len(b.tolist()), "tolist reads values"),
        (lambda a, b: a + b.numpy().sum(), "numpy reads values"),
        (lambda a, b: a + torch.rand(3), "nondeterministic_seeded"),
        (lambda a, b: torch.dropout(a.float(), 0.5, train=True), "nondeterministic_seeded"),
        (launch_with_text, "a kernel is called with"),
    ],
)
def test_what_cannot_be_repeated_is_refused(run: Run, message: str) -> None:
    """The pass runs to its end all the same, once."""
    num_runs = 0

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal num_runs
        num_runs += 1
        return run(a, b) + 0

    refusal = capture(counted)
    assert isinstance(refusal, str)
    assert message in refusal
    assert num_runs == 1
    assert type(current_launcher()) is Launcher


def test_dropout_that_does_nothing_is_captured() -> None:
    check(lambda a, b: torch.dropout(a.float(), 0.5, train=False) + 1)


def test_an_error_of_the_pass_is_its_own() -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(run)
    assert type(current_launcher()) is Launcher
    assert current_launcher().new_output((2,), torch.float32).shape == (2,)
