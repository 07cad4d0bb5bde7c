"""Linear backends against float64, and which one is taken."""

import logging

import numba
import pytest
import torch
from corun.cpu_workers.kernels.layout import has_bfloat16_dot
from corun.gpu.linear import select
from corun.gpu.linear.base import MakeLinear
from corun.gpu.linear.onednn import OnednnLinear
from corun.gpu.linear.plain import PlainLinear
from corun.gpu.linear.select import select_linear_backend
from corun.gpu.linear.vnni import VnniLinear
from corun.runtime.errors import ConfigError

needs_dot = pytest.mark.skipif(not has_bfloat16_dot(), reason="needs AVX512_BF16")


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (PlainLinear, torch.float32),
        (PlainLinear, torch.bfloat16),
        (OnednnLinear, torch.float32),
        (OnednnLinear, torch.bfloat16),
        pytest.param(VnniLinear, torch.bfloat16, marks=needs_dot),
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


@needs_dot
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(1, 1), (16, 2), (64, 8), (65, 9), (130, 70), (192, 320)]
)
def test_vnni_of_any_shape(out_features: int, in_features: int) -> None:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator).bfloat16()
    bias = torch.randn(out_features, generator=generator).bfloat16()
    backend = VnniLinear(weight, bias)
    for tokens in (*range(18), 64, 130):
        x = torch.randn(tokens, in_features, generator=generator).bfloat16()
        y = backend(x)
        truth = x.double() @ weight.double().t() + bias.double()
        assert y.shape == (tokens, out_features)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=1e-4)
    assert torch.equal(backend.weight, weight)


@needs_dot
def test_vnni_computes_a_token_the_same_with_any_number_of_others() -> None:
    generator = torch.Generator().manual_seed(0)
    backend = VnniLinear(torch.randn(192, 640, generator=generator).bfloat16(), None)
    x = torch.randn(37, 640, generator=generator).bfloat16()
    alone = torch.cat([backend(x[token : token + 1]) for token in range(len(x))])
    for tokens in (2, 3, 7, 8, 12, 13, 37):
        assert torch.equal(backend(x[:tokens]), alone[:tokens])


@needs_dot
@pytest.mark.parametrize("in_features", [40, 37])
def test_vnni_takes_rows_with_gaps_and_reads_nothing_else(in_features: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, in_features, generator=generator).bfloat16()
    wide = torch.full((11, 2 * in_features), float("nan")).bfloat16()
    wide[:, 3 : 3 + in_features] = torch.randn(11, in_features, generator=generator).bfloat16()
    x = wide[:, 3 : 3 + in_features]
    backend = VnniLinear(weight, None)
    assert torch.equal(backend(x), backend(x.contiguous()))
    transposed = x.t().contiguous().t()
    assert torch.equal(backend(transposed), backend(x.contiguous()))


@needs_dot
@pytest.mark.parametrize("num_threads", [1, 2])
def test_vnni_with_any_number_of_threads(num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    backend = VnniLinear(torch.randn(448, 512, generator=generator).bfloat16(), None)
    x = torch.randn(5, 512, generator=generator).bfloat16()
    expected = backend(x)
    before = numba.get_num_threads()
    numba.set_num_threads(min(num_threads, before))
    try:
        assert torch.equal(backend(x), expected)
    finally:
        numba.set_num_threads(before)


@needs_dot
def test_vnni_keeps_what_is_not_a_number_to_its_token() -> None:
    backend = VnniLinear(torch.ones(64, 8).bfloat16(), None)
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
        ("auto", torch.bfloat16, "cpu", {"plain", "onednn", "vnni"}),
        pytest.param("vnni", torch.bfloat16, "cpu", {"vnni"}, marks=needs_dot),
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
        ("vnni", torch.float32, "cpu", "it computes torch.bfloat16"),
        ("vnni", torch.bfloat16, "cuda", "for the CPU"),
        ("cublas", torch.float32, "cpu", "unknown"),
    ],
)
def test_refusal_names_the_flag_and_the_reason(
    name: str, dtype: torch.dtype, device: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"--linear-backend '?{name}'? .*{reason}"):
        select_linear_backend(name, device=device, dtype=dtype)


def test_vnni_needs_its_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "has_bfloat16_dot", lambda: False)
    with pytest.raises(ConfigError, match=r"--linear-backend vnni .*AVX512_BF16"):
        select_linear_backend("vnni", device="cpu", dtype=torch.bfloat16)
    assert select_linear_backend("auto", device="cpu", dtype=torch.bfloat16).name != "vnni"


def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(backend: OnednnLinear, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x.shape[:-1], backend.weight.shape[0])

    monkeypatch.setattr(OnednnLinear, "__call__", spoil)
    with pytest.raises(ConfigError, match="product is wrong"):
        select_linear_backend("onednn", device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"vnni": [1.0, 10.0], "onednn": [1.0, 10.0], "plain": [2.0, 9.0]}, "vnni"),
        ({"vnni": [1.0, 10.0], "onednn": [0.95, 9.9], "plain": [2.0, 9.0]}, "vnni"),
        ({"vnni": [1.0, 10.0], "onednn": [0.6, 10.0], "plain": [0.5, 11.0]}, "onednn"),
        ({"onednn": [1.0, 10.0], "plain": [1.0, 5.0]}, "plain"),
    ],
)
def test_auto_leaves_the_preferred_only_for_a_gain(
    times: dict[str, list[float]], expected: str
) -> None:
    assert select._fastest(times) == expected
