"""Quantised checkpoints on CUDA: which ones are modules of a library, and what of them is left."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corun.gpu.model import quantization_plan, quantized_modules
from corun.gpu.model.quantization_plan import MODULE_PACKAGES, Quantization, plan_quantization
from corun.gpu.model.quantized_modules import QuantizedModules
from corun.gpu.model.source import ModelSource, load_config
from corun.gpu.model.stored_quantization import StoredQuantization
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import AdapterError, ConfigError
from safetensors.torch import load_file
from support.architectures import save_model
from support.four_bit import four_bit_config, store_in_four_bits
from support.stored_formats import FORMATS
from torch import nn

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}


def plan(entry: dict[str, Any], device: str = "cuda", **options: Any) -> Quantization | None:
    config = SimpleNamespace(quantization_config=entry)
    return plan_quantization(EngineConfig(**options), config, torch.device(device))


@pytest.fixture
def has_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_plan, "find_spec", lambda _name: object())


@pytest.mark.usefixtures("has_packages")
@pytest.mark.parametrize(
    "entry", [four_bit_config(), FORMATS["fp8"][1], FORMATS["bitsandbytes int8"][1], GPTQ, AWQ]
)
def test_modules_are_for_cuda_and_for_matrices_as_stored(entry: dict[str, Any]) -> None:
    planned = plan(entry)
    assert planned is not None and planned.has_modules and planned.label.count("as modules") == 1
    for device, options in (("cpu", {}), ("cpu", {"quantization": "off"}), ("cuda", {"quantization": "off"})):
        other = plan(entry, device, **options)
        assert other is not None and not other.has_modules and other.label != planned.label
    with pytest.raises(ConfigError, match="--quantization int8 is supported only on the CPU"):
        plan(entry, quantization="int8")


@pytest.mark.parametrize("entry", [FORMATS["compressed int4"][1], FORMATS["mxfp4"][1]])
def test_other_formats_are_full_on_cuda(entry: dict[str, Any]) -> None:
    planned = plan(entry)
    assert planned is not None and planned.stored is not None
    assert planned.stored.in_full and not planned.has_modules


@pytest.mark.parametrize("method", MODULE_PACKAGES)
def test_missing_packages_are_named(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"bitsandbytes": four_bit_config(), "fp8": FORMATS["fp8"][1], "gptq": GPTQ, "awq": AWQ}
    missing = MODULE_PACKAGES[method][1:]
    monkeypatch.setattr(quantization_plan, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(ConfigError) as raised:
        plan(entry[method])
    assert str(raised.value) == (
        f"a checkpoint of {method} needs {' and '.join(missing)} on CUDA: pip install "
        f"{' '.join(missing)}, or use --quantization off, which reads it in full"
    )
    assert plan(entry[method], quantization="off") is not None


class Codes(nn.Module):
    """Stands for a library's module."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Buffer(torch.zeros(7, 5, dtype=torch.uint8))


def test_modules_of_bitsandbytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are loaded in the type on disk, as transformers converts only some of its tensors."""
    directory = save_model("llama3-rope", tmp_path / "model")
    four_bit = store_in_four_bits(directory, tmp_path / "nf4", dtype=torch.float16)
    caplog.set_level(logging.INFO)
    asked = []

    def load(_source: Any, _config: Any, dtype: torch.dtype, *_: Any) -> Any:
        asked.append(dtype)
        return SimpleNamespace(dtype=dtype)

    monkeypatch.setattr(quantized_modules, "load_model", load)
    source = ModelSource(str(four_bit))
    planned = Quantization(None, None, StoredQuantization("bitsandbytes"), has_modules=True)
    modules = QuantizedModules(source, load_config(source), planned)
    modules.load_rest(torch.bfloat16, torch.device("cpu"), "eager")
    assert asked == [torch.float16]
    assert "served in torch.float16 instead of torch.bfloat16" in caplog.text

    path = "model.layers.1.mlp.up_proj"
    assert modules.make(path, nn.Linear(3, 3)) is None
    taken, unknown = modules.make(path, Codes()), modules.make("model.other", Codes())
    assert taken is not None and unknown is not None
    assert torch.equal(taken.weight, load_file(directory / "model.safetensors")[f"{path}.weight"])
    with pytest.raises(AdapterError, match=r"DoRA needs the weight of model\.other"):
        _ = unknown.weight
    weights = modules.finish({f"{path}.weight": 1000, f"{path}.bias": 10, "model.norm.weight": 8})
    assert (weights.num_bytes, weights.quantized_bytes, weights.kind) == (78, 70, "bitsandbytes")
    assert weights.label == planned.label
    assert "2 linears are computed by modules of bitsandbytes" in caplog.text
