"""The grouped LoRA kernel, called by its back end: a token's bits do not depend on others."""

import math

import pytest
import torch
from corun.cpu_workers.kernels.simd.layout import BFLOAT16
from corun.gpu.forward.kernel_threads import set_kernel_helpers
from corun.gpu.lora.numba_backend import NumbaLora
from corun.gpu.lora.table import DeviceAdapter, LoraTable
from support.lora import make_batch

each_arithmetic = pytest.mark.parametrize(
    ("dtype", "is_portable"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "bfloat16-portable"],
)


@each_arithmetic
@pytest.mark.parametrize("rank", [5, 16, 40])
def test_a_token_gets_the_same_bits_in_every_batch(dtype: torch.dtype, is_portable: bool, rank: int) -> None:
    """Seeded answers do not depend on the batch, so deltas must not."""
    table = LoraTable(1, 1, "cpu")
    backend = NumbaLora(table, dtype=dtype, tag=BFLOAT16 if is_portable else None)
    a, b = (torch.randn(shape).to(dtype) for shape in ((rank, 1024), (256, rank)))
    row = table.add(DeviceAdapter({0: backend.pack(a, b, 1.0)}))
    x = torch.randn(19, 1024).to(dtype)

    def delta(first: int, last: int) -> torch.Tensor:
        y = torch.zeros(last - first, 256, dtype=dtype)
        backend.add_delta(x[first:last], y, 0, make_batch([(0, last - first, 0)], table, [row]))
        return y

    whole = delta(0, 19)
    for num_tokens in (1, 2, 4, 7, 8, 12):
        parts = [delta(i, min(i + num_tokens, 19)) for i in range(0, 19, num_tokens)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("portable", [False, True])
def test_non_finite_values_stay_in_their_row(portable: bool) -> None:
    table = LoraTable(1, 1, "cpu")
    backend = NumbaLora(table, dtype=torch.bfloat16, tag=BFLOAT16 if portable else None)
    a = torch.randn(3, 64, dtype=torch.bfloat16)
    b = torch.randn(32, 3, dtype=torch.bfloat16)
    row = table.add(DeviceAdapter({0: backend.pack(a, b, 1.0)}))
    x = torch.randn(9, 64, dtype=torch.bfloat16)
    x[4, 7] = math.nan
    y = torch.zeros(9, 32, dtype=torch.bfloat16)
    backend.add_delta(x, y, 0, make_batch([(0, 9, 0)], table, [row]))
    assert bool(y[4].isnan().all())
    assert bool(torch.cat((y[:4], y[5:])).isfinite().all())


@each_arithmetic
@pytest.mark.parametrize("num_tokens", [1, 9, 70])  # pieces of one token, and of four
def test_helpers_change_no_bits(dtype: torch.dtype, is_portable: bool, num_tokens: int) -> None:
    table = LoraTable(1, 2, "cpu")
    backend = NumbaLora(table, dtype=dtype, tag=BFLOAT16 if is_portable else None)
    rows = [
        table.add(
            DeviceAdapter(
                {0: backend.pack(torch.randn(rank, 512).to(dtype), torch.randn(256, rank).to(dtype), 1.0)}
            )
        )
        for rank in (8, 40)
    ]
    x = torch.randn(num_tokens, 512).to(dtype)
    half = num_tokens // 2
    batch = make_batch([(0, half, 0), (half, num_tokens, 1)], table, rows)

    def delta() -> torch.Tensor:
        y = torch.zeros(num_tokens, 256, dtype=dtype)
        backend.add_delta(x, y, 0, batch)
        return y

    alone = delta()
    set_kernel_helpers(2)
    try:
        for _ in range(20):
            assert torch.equal(delta(), alone)
    finally:
        set_kernel_helpers(0)
