"""The choice of a LoRA back end, and errors of an unusable one."""

import logging

import pytest
import torch
from corun.gpu.lora.numba_backend import NumbaLora
from corun.gpu.lora.select import select_lora_backend
from corun.gpu.lora.table import LoraTable
from corun.runtime.errors import ConfigError


def choose(name: str, dtype: torch.dtype, device: str = "cpu") -> str:
    table = LoraTable(1, 1, "cpu")
    return select_lora_backend(name, table=table, device=device, dtype=dtype).name


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", torch.float32, "numba"),
        ("auto", torch.bfloat16, "numba"),
        ("auto", torch.float16, "torch"),
        ("torch", torch.bfloat16, "torch"),
        ("numba", torch.bfloat16, "numba"),
    ],
)
def test_choice_on_the_cpu(
    name: str, dtype: torch.dtype, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="corun.gpu.lora.select"):
        assert choose(name, dtype) == expected
    assert f"LoRA backend: {expected}" in caplog.text
    (record,) = (one for one in caplog.records if one.name == "corun.gpu.lora.select")
    is_fallback = name == "auto" and expected == "torch"
    assert record.levelname == ("WARNING" if is_fallback else "INFO")


@pytest.mark.parametrize(
    ("name", "dtype", "device", "reason"),
    [
        ("numba", torch.float16, "cpu", "float32 and bfloat16"),
        ("numba", torch.float32, "cuda", "it supports only the CPU"),
        ("triton", torch.float32, "cpu", "supports only CUDA"),
        ("cutlass", torch.float32, "cpu", "unknown"),
    ],
)
def test_refusal_names_the_flag_and_the_reason(
    name: str, dtype: torch.dtype, device: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"--lora-backend '?{name}'? .*{reason}"):
        choose(name, dtype, device)


def test_wrong_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(NumbaLora):
        def add_delta(self, x: torch.Tensor, y: torch.Tensor, *rest: object) -> None:
            y += 0.25

    monkeypatch.setattr("corun.gpu.lora.numba_backend.NumbaLora", Wrong)
    assert choose("auto", torch.float32) == "torch"
    with pytest.raises(ConfigError, match="wrong on this machine"):
        choose("numba", torch.float32)


def test_a_slow_loop_in_place_of_triton_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> torch.Generator:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("torch.Generator", broken)
    assert choose("auto", torch.bfloat16, "cuda") == "torch"
    (record,) = (one for one in caplog.records if one.levelno >= logging.WARNING)
    assert "triton does not work: its probe failed: RuntimeError: no such" in record.message
