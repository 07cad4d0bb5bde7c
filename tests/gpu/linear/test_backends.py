"""Linear back ends against float64, and the choice between them."""

import logging
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from corun.cpu_workers.kernels.simd.isa import has_matrix_registers, process_isa
from corun.cpu_workers.kernels.simd.layout import BFLOAT16, BFLOAT16_DOT, BFLOAT16_TILES
from corun.gpu.linear import select
from corun.gpu.linear.base import MakeLinear
from corun.gpu.linear.numba_backend import NumbaLinear
from corun.gpu.linear.onednn import OnednnLinear, product_dtype
from corun.gpu.linear.plain import PlainLinear
from corun.gpu.linear.select import select_linear_backend
from corun.gpu.quiet_time import Sample
from corun.runtime.errors import ConfigError

# All arithmetics that this process supports, not only the chosen one.
TAGS: list[np.generic] = [BFLOAT16]
TAGS += [BFLOAT16_DOT] if process_isa().has_bfloat16_dot else []
TAGS += [BFLOAT16_TILES] if has_matrix_registers() else []


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
    name: str, dtype: torch.dtype, device: str, expected: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="corun.gpu.linear.select"):
        make = select_linear_backend(name, device=device, dtype=dtype)
    chosen = make(torch.ones(4, 4, dtype=dtype), None).name
    assert chosen in expected
    assert f"linear backend: {chosen}" in caplog.text


@pytest.mark.parametrize(
    ("name", "dtype", "device", "reason"),
    [
        ("onednn", torch.float32, "cuda", "it supports only the CPU"),
        ("onednn", torch.float64, "cpu", "it supports .*float32.*, the model is torch.float64"),
        ("numba", torch.float32, "cpu", "it supports torch.bfloat16, the model is torch.float32"),
        ("numba", torch.bfloat16, "cuda", "it supports only the CPU"),
        ("cublas", torch.float32, "cpu", "unknown"),
    ],
)
def test_refusal_names_the_flag_and_the_reason(
    name: str, dtype: torch.dtype, device: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"--linear-backend '?{name}'? .*{reason}"):
        select_linear_backend(name, device=device, dtype=dtype)


def test_onednn_multiplies_in_float32_what_the_processor_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_auto_leaves_the_preferred_only_for_a_gain(times: dict[str, list[float]], expected: str) -> None:
    assert select.fastest(times) == expected


def record(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> list[int]:
    """Make every product seem to take a scheduler tick; returns the number of measurements."""
    count: list[int] = []
    recorded_ms = [19.967, 20.016, 19.984, 20.003]

    def take(call: object, num_quiet: int, limit_s: float) -> list[Sample]:
        count.append(1)
        # numba comes first, and its best sample is the worse one.
        took_s = [ms * (1.5 if len(count) <= 3 else 1) * 1e-3 for ms in recorded_ms]
        return [Sample(one, 0.0 if quiet else one * 0.99) for one in took_s]

    monkeypatch.setattr(select, "take_samples", take)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_chooses_nothing_and_is_not_kept(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = record(monkeypatch, quiet=False)
    preferred = "numba" if dtype is torch.bfloat16 else "onednn"
    with caplog.at_level(logging.INFO, logger="corun.gpu.linear.select"):
        for _ in range(2):
            make = select_linear_backend("auto", device="cpu", dtype=dtype, kept=tmp_path)
            assert make.name == preferred
    assert caplog.text.count("not measured, because others use the CPU cores") == 2
    assert len(count) % 2 == 0 and len(count) > 0
    assert not list(tmp_path.rglob("*.json"))


def test_starts_of_other_tests_measure_nothing(caplog: pytest.LogCaptureFixture) -> None:
    state = Path(os.environ["XDG_STATE_HOME"], "corun")
    with caplog.at_level(logging.INFO, logger="corun.gpu.linear.select"):
        select_linear_backend("auto", device="cpu", dtype=torch.bfloat16, kept=state)
    assert "numba (measured at an earlier start" in caplog.text


def test_a_quiet_choice_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = record(monkeypatch, quiet=True)
    first = select_linear_backend("auto", device="cpu", dtype=torch.float32, kept=tmp_path)
    measured = len(count)
    assert measured > 0
    with caplog.at_level(logging.INFO, logger="corun.gpu.linear.select"):
        again = select_linear_backend("auto", device="cpu", dtype=torch.float32, kept=tmp_path)
    assert again is first
    assert len(count) == measured and "measured at an earlier start" in caplog.text
    (file,) = tmp_path.rglob("*.json")
    file.write_text('"cublas"')
    select_linear_backend("auto", device="cpu", dtype=torch.float32, kept=tmp_path)
    assert len(count) == 2 * measured
