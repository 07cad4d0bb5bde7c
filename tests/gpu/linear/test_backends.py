"""Linear backends against float64, and which one is taken."""

import logging

import pytest
import torch
from corun.gpu.linear.base import MakeLinear
from corun.gpu.linear.onednn import OnednnLinear
from corun.gpu.linear.plain import PlainLinear
from corun.gpu.linear.select import select_linear_backend
from corun.runtime.errors import ConfigError


@pytest.mark.parametrize("make", [PlainLinear, OnednnLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


@pytest.mark.parametrize(
    ("name", "dtype", "device", "expected"),
    [
        ("plain", torch.float32, "cpu", {"plain"}),
        ("onednn", torch.float32, "cpu", {"onednn"}),
        ("auto", torch.float32, "cpu", {"plain", "onednn"}),
        ("auto", torch.bfloat16, "cpu", {"plain", "onednn"}),
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
    chosen = make(torch.ones(4, 4), None).name
    assert chosen in expected
    assert f"linear backend: {chosen}" in caplog.text


@pytest.mark.parametrize(
    ("name", "dtype", "device", "reason"),
    [
        ("onednn", torch.float32, "cuda", "for the CPU"),
        ("onednn", torch.float64, "cpu", "cannot pack"),
        ("cublas", torch.float32, "cpu", "unknown"),
    ],
)
def test_refusal_names_the_flag_and_the_reason(
    name: str, dtype: torch.dtype, device: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"--linear-backend '?{name}'? .*{reason}"):
        select_linear_backend(name, device=device, dtype=dtype)
