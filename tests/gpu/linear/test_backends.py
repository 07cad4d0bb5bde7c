"""Linear backends against float64, and which one is taken."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from corun.cpu_workers.kernels.simd.isa import process_isa
from corun.cpu_workers.kernels.simd.layout import BFLOAT16, BFLOAT16_DOT
from corun.gpu.forward.kernel_threads import num_kernel_threads, set_kernel_threads
from corun.gpu.linear import select
from corun.gpu.linear.base import MakeLinear
from corun.gpu.linear.numba_backend import NumbaLinear
from corun.gpu.linear.onednn import OnednnLinear, product_dtype
from corun.gpu.linear.plain import PlainLinear
from corun.gpu.linear.select import select_linear_backend
from corun.runtime.errors import ConfigError

# The arithmetics that this process can compute with, whatever it would choose.
TAGS = [BFLOAT16, BFLOAT16_DOT] if process_isa().has_bfloat16_dot else [BFLOAT16]
each_tag = pytest.mark.parametrize("tag", TAGS, ids=lambda tag: tag.dtype.name)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (PlainLinear, torch.float32),
        (PlainLinear, torch.bfloat16),
        (OnednnLinear, torch.float32),
        (OnednnLinear, torch.bfloat16),
        (OnednnLinear, torch.float16),
        *((partial(NumbaLinear, tag=tag), torch.bfloat16) for tag in TAGS),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_product(make: MakeLinear, dtype: torch.dtype, has_bias: bool, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(50, 37, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(1, tokens, 37, generator=generator).to(dtype)
    backend = make(weight, bias)
    y = backend(x)
    truth = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert y.shape == (1, tokens, 50)
    assert y.dtype == dtype
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert torch.equal(backend.weight, weight)
    assert (backend.bias is None) == (bias is None)


@each_tag
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(1, 1), (16, 2), (64, 8), (65, 9), (130, 70), (192, 320)]
)
def test_numba_of_any_shape(out_features: int, in_features: int, tag: np.generic) -> None:
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
def test_numba_computes_a_token_the_same_with_any_number_of_others(tag: np.generic) -> None:
    generator = torch.Generator().manual_seed(0)
    backend = NumbaLinear(torch.randn(192, 640, generator=generator).bfloat16(), None, tag=tag)
    x = torch.randn(37, 640, generator=generator).bfloat16()
    alone = torch.cat([backend(x[token : token + 1]) for token in range(len(x))])
    for tokens in (*range(2, 20), 37):
        assert torch.equal(backend(x[:tokens]), alone[:tokens])


@each_tag
@pytest.mark.parametrize("in_features", [40, 37])
def test_numba_takes_rows_with_gaps_and_reads_nothing_else(
    in_features: int, tag: np.generic
) -> None:
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
def test_numba_with_any_number_of_threads(tokens: int, tag: np.generic) -> None:
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
def test_numba_keeps_what_is_not_a_number_to_its_token(tag: np.generic) -> None:
    backend = NumbaLinear(torch.ones(64, 8).bfloat16(), None, tag=tag)
    x = torch.ones(3, 8).bfloat16()
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    y = backend(x)
    assert torch.equal(y[0], torch.full((64,), 8.0).bfloat16())
    assert bool(y[1].isnan().all())
    assert bool((y[2] == float("inf")).all())


@pytest.mark.parametrize(
    ("name", "dtype", "device", "expected"),
    [
        ("plain", torch.float32, "cpu", {"plain"}),
        ("onednn", torch.float32, "cpu", {"onednn"}),
        ("auto", torch.float32, "cpu", {"plain", "onednn"}),
        ("auto", torch.bfloat16, "cpu", {"plain", "onednn", "numba"}),
        ("numba", torch.bfloat16, "cpu", {"numba"}),
        ("auto", torch.float32, "cuda", {"plain"}),
        ("auto", torch.float64, "cpu", {"plain"}),
    ],
)
def test_choice(
    name: str,
    dtype: torch.dtype,
    device: str,
    expected: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="corun.gpu.linear.select"):
        make = select_linear_backend(name, device=device, dtype=dtype)
    chosen = make(torch.ones(4, 4, dtype=dtype), None).name
    assert chosen in expected
    assert f"linear backend: {chosen}" in caplog.text


@pytest.mark.parametrize(
    ("name", "dtype", "device", "reason"),
    [
        ("onednn", torch.float32, "cuda", "for the CPU"),
        ("onednn", torch.float64, "cpu", "it computes .*float32.*, the model is torch.float64"),
        ("numba", torch.float32, "cpu", "it computes torch.bfloat16"),
        ("numba", torch.bfloat16, "cuda", "for the CPU"),
        ("cublas", torch.float32, "cpu", "unknown"),
    ],
)
def test_refusal_names_the_flag_and_the_reason(
    name: str, dtype: torch.dtype, device: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"--linear-backend '?{name}'? .*{reason}"):
        select_linear_backend(name, device=device, dtype=dtype)


def test_onednn_multiplies_in_float32_what_the_processor_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_fp16_supported", lambda: False)
    assert product_dtype(torch.float16) == product_dtype(torch.float32) == torch.float32
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(33, 70, generator=generator).half()
    x = torch.randn(5, 70, generator=generator).half()
    backend = OnednnLinear(weight, weight[:, 0])
    truth = x.float() @ weight.t().float() + weight[:, 0].float()
    torch.testing.assert_close(backend(x), truth.half(), rtol=2**-10, atol=1e-4)
    assert torch.equal(backend.weight, weight)


def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(backend: OnednnLinear, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x.shape[:-1], backend.weight.shape[0])

    monkeypatch.setattr(OnednnLinear, "__call__", spoil)
    with pytest.raises(ConfigError, match="product is wrong"):
        select_linear_backend("onednn", device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"numba": [1.0, 10.0], "onednn": [1.0, 10.0], "plain": [2.0, 9.0]}, "numba"),
        ({"numba": [1.0, 10.0], "onednn": [0.95, 9.9], "plain": [2.0, 9.0]}, "numba"),
        ({"numba": [1.0, 10.0], "onednn": [0.6, 10.0], "plain": [0.5, 11.0]}, "onednn"),
        ({"onednn": [1.0, 10.0], "plain": [1.0, 5.0]}, "plain"),
    ],
)
def test_auto_leaves_the_preferred_only_for_a_gain(
    times: dict[str, list[float]], expected: str
) -> None:
    assert select.fastest(times) == expected
