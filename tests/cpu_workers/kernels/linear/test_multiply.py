"""The kernel of dense products, called by its back end, against float64."""

import numpy as np
import pytest
import torch
from corun.cpu_workers.kernels.simd.isa import has_matrix_registers, process_isa
from corun.cpu_workers.kernels.simd.layout import BFLOAT16, BFLOAT16_DOT, BFLOAT16_TILES
from corun.gpu.forward.kernel_threads import num_kernel_threads, set_kernel_helpers, set_kernel_threads
from corun.gpu.linear.numba_backend import NumbaLinear

# All arithmetics that this process supports, not only the chosen one.
TAGS: list[np.generic] = [BFLOAT16]
TAGS += [BFLOAT16_DOT] if process_isa().has_bfloat16_dot else []
TAGS += [BFLOAT16_TILES] if has_matrix_registers() else []
each_tag = pytest.mark.parametrize("tag", TAGS, ids=lambda tag: tag.dtype.name)


@each_tag
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(1, 1), (16, 2), (64, 8), (65, 9), (130, 70), (192, 320)]
)
def test_products_of_any_shape(out_features: int, in_features: int, tag: np.generic) -> None:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    bias = torch.randn(out_features, generator=generator).bfloat16()
    backend = NumbaLinear(weight, bias, tag=tag)
    for tokens in (*range(26), 64, 127, 130):
        x = torch.randn(tokens, in_features, generator=generator).bfloat16()
        y = backend(x)
        truth = x.double() @ weight.double().t() + bias.double()
        assert y.shape == (tokens, out_features)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=1e-4)
    assert torch.equal(backend.weight, weight)


@each_tag
def test_a_token_is_computed_the_same_with_any_number_of_others(tag: np.generic) -> None:
    generator = torch.Generator().manual_seed(0)
    backend = NumbaLinear(torch.randn(192, 640, generator=generator).bfloat16(), None, tag=tag)
    x = torch.randn(37, 640, generator=generator).bfloat16()
    alone = torch.cat([backend(x[token : token + 1]) for token in range(len(x))])
    for tokens in (*range(2, 20), 37):
        assert torch.equal(backend(x[:tokens]), alone[:tokens])


@each_tag
@pytest.mark.parametrize("in_features", [40, 37])
def test_rows_with_gaps_of_which_nothing_else_is_read(in_features: int, tag: np.generic) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, in_features, generator=generator).bfloat16()
    wide = torch.full((11, 2 * in_features), float("nan")).bfloat16()
    wide[:, 3 : 3 + in_features] = torch.randn(11, in_features, generator=generator).bfloat16()
    x = wide[:, 3 : 3 + in_features]
    backend = NumbaLinear(weight, None, tag=tag)
    assert torch.equal(backend(x), backend(x.contiguous()))
    transposed = x.t().contiguous().t()
    assert torch.equal(backend(transposed), backend(x.contiguous()))


@each_tag
@pytest.mark.parametrize("tokens", [5, 130])  # few: each thread makes x float32 for itself
def test_products_of_any_number_of_threads(tokens: int, tag: np.generic) -> None:
    generator = torch.Generator().manual_seed(0)
    backend = NumbaLinear(torch.randn(448, 512, generator=generator).bfloat16(), None, tag=tag)
    x = torch.randn(tokens, 512, generator=generator).bfloat16()
    before = num_kernel_threads()
    results = []
    try:
        for num_threads in (1, 2):
            set_kernel_threads(num_threads)
            results.append(backend(x))
    finally:
        set_kernel_threads(before)
    assert torch.equal(*results)
    truth = x.float() @ backend.weight.float().t()
    torch.testing.assert_close(results[0].float(), truth, rtol=2**-7, atol=2**-3)


@each_tag
@pytest.mark.parametrize("out_features", [70, 448, 4224])  # pieces of one unit, and of two
def test_products_with_helpers(out_features: int, tag: np.generic) -> None:
    generator = torch.Generator().manual_seed(0)
    backend = NumbaLinear(torch.randn(out_features, 768, generator=generator).bfloat16(), None, tag=tag)
    inputs = [torch.randn(tokens, 768, generator=generator).bfloat16() for tokens in (1, 5, 8, 40)]
    alone = [backend(x) for x in inputs]
    for num_helpers in (1, 3):
        set_kernel_helpers(num_helpers)
        try:
            for _ in range(20):
                assert all(torch.equal(backend(x), y) for x, y in zip(inputs, alone, strict=True))
        finally:
            set_kernel_helpers(0)


@each_tag
def test_what_is_not_a_number_stays_in_its_token(tag: np.generic) -> None:
    backend = NumbaLinear(torch.ones(64, 8).bfloat16(), None, tag=tag)
    x = torch.ones(3, 8).bfloat16()
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    y = backend(x)
    assert torch.equal(y[0], torch.full((64,), 8.0).bfloat16())
    assert bool(y[1].isnan().all())
    assert bool((y[2] == float("inf")).all())
