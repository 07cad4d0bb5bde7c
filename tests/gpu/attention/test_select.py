"""The choice of a back end, its log lines, and refusals."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corun.gpu.attention import select
from corun.gpu.attention.numba_backend import NumbaAttention
from corun.gpu.attention.probe import LayerShape, max_probe_error
from corun.gpu.attention.select import select_attention_backend
from corun.gpu.attention.torch_backend import TorchAttention
from corun.runtime.errors import ConfigError

CPU = torch.device("cpu")


class _WrongAttention(TorchAttention):
    def forward(self, *arguments: Any) -> torch.Tensor:
        return super().forward(*arguments) * 1.01


class _NanAttention(TorchAttention):
    def forward(self, *arguments: Any) -> torch.Tensor:
        return super().forward(*arguments) * torch.nan


class _BrokenAttention(TorchAttention):
    def forward(self, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, "numba"), (torch.bfloat16, "numba"), (torch.float16, "torch"), (torch.float64, "torch")],
)
def test_auto_takes_what_the_dtype_allows_and_says_why(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, expected: str
) -> None:
    with caplog.at_level(logging.INFO, logger="corun"):
        backend = select_attention_backend("auto", device=CPU, dtype=dtype)
    assert backend.name == expected
    assert f"attention: {expected}" in caplog.text
    if expected == "torch":
        assert "only float32 and bfloat16" in caplog.text


def test_the_threading_layer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="corun"):
        backend = select_attention_backend("numba", device=CPU, dtype=torch.float32)
    assert isinstance(backend, NumbaAttention)
    assert f"{backend.threading_layer} layer" in caplog.text


def test_torch_can_be_asked_for() -> None:
    backend = select_attention_backend("torch", device=CPU, dtype=torch.bfloat16)
    assert isinstance(backend, TorchAttention)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "reason"),
    [
        ("numba", "cpu", torch.float16, "only float32 and bfloat16"),
        ("numba", "cuda", torch.float32, "supports only the CPU"),
        ("triton", "cpu", torch.float64, "only float32, float16 and bfloat16"),
        ("flash", "cpu", torch.float32, "choose one of auto, numba, triton, torch"),
    ],
)
def test_what_cannot_work_is_refused_by_flag_and_reason(
    name: str, device: str, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(ConfigError, match="--attention-backend") as error:
        select_attention_backend(name, device=torch.device(device), dtype=dtype)
    assert reason in str(error.value)


def test_triton_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "corun.gpu.attention.triton_kernels", None)
    monkeypatch.delattr("corun.gpu.attention.triton_kernels", raising=False)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        select_attention_backend("triton", device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (_WrongAttention, "the probe's error is 0.0"),
        (_NanAttention, "the probe's error is nan"),
        (_BrokenAttention, "the probe failed: RuntimeError: no such instruction"),
    ],
)
def test_a_back_end_that_fails_its_probe_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: type[Any], reason: str
) -> None:
    monkeypatch.setattr(select, "NumbaAttention", broken)
    with caplog.at_level(logging.INFO, logger="corun"):
        assert select_attention_backend("auto", device=CPU, dtype=torch.float32).name == "torch"
    assert reason in caplog.text
    with pytest.raises(ConfigError, match="--attention-backend numba does not work") as error:
        select_attention_backend("numba", device=CPU, dtype=torch.float32)
    assert reason in str(error.value)


def test_a_slow_loop_in_place_of_triton_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no such instruction")

    triton = SimpleNamespace(is_interpreted=False)
    monkeypatch.setattr("corun.gpu.attention.triton_backend.TritonAttention", lambda _: triton)
    monkeypatch.setattr(select, "max_probe_error", broken)
    chosen = select_attention_backend("auto", device=torch.device("cuda"), dtype=torch.bfloat16)
    assert chosen.name == "torch"
    (record,) = (one for one in caplog.records if one.levelno >= logging.WARNING)
    assert "the probe failed: RuntimeError: no such instruction" in record.message


def test_the_probe_takes_any_layer() -> None:
    shape = LayerShape(CPU, torch.float32, heads=6, kv_heads=3, key_dim=24, value_dim=8)
    assert max_probe_error(NumbaAttention(), shape) < 1e-5
