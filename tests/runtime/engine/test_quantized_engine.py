"""An engine over weights in fewer bits: its facts, and values that are not finite."""

from pathlib import Path
from typing import Any

import pytest
import torch
from corun import Engine, SamplingParams
from corun.runtime.errors import StepFailedError
from safetensors.torch import load_file, save_file
from support.architectures import save_model
from support.fake_core import save_tokenizer

pytestmark = pytest.mark.usefixtures("one_torch_thread")
BAD_TOKEN = 5
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_activations_that_are_no_numbers_fail_their_request_alone(
    tmp_path: Path, quantization: str, value: float
) -> None:
    directory = save_model("llama3-rope", tmp_path)
    save_tokenizer(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][BAD_TOKEN, 7] = value
    save_file(tensors, file, metadata={"format": "pt"})
    options: dict[str, Any] = {"memory_gib": 0.01, "skip_parity_probe": True}
    with Engine(model=str(directory), device="cpu", quantization=quantization, **options) as engine:
        (alone,) = engine.generate([[6, 7, 8]], GREEDY)
        with pytest.raises(StepFailedError, match="not finite"):
            engine.generate([[6, 7, 8], [6, BAD_TOKEN, 8]], GREEDY)
        (again,) = engine.generate([[6, 7, 8]], GREEDY)
        assert again.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_start_says_what_its_weights_take(tmp_path: Path) -> None:
    directory = save_model("llama3-rope", tmp_path)
    save_tokenizer(directory)
    tensors = load_file(directory / "model.safetensors")
    full_bytes = sum(2 * tensor.numel() for tensor in tensors.values())
    with Engine(model=str(directory), device="cpu", quantization="int4", memory_gib=0.01) as engine:
        info = engine.get_model_info()
    assert 0 < info.quantized_bytes < info.weight_bytes < full_bytes
    assert info.backends["weights"] == "int4, head int8"
    assert info.dtype == str(torch.bfloat16).removeprefix("torch.")
    line = next(line for line in info.summary if line.startswith("weights"))
    assert "MiB in int4, head int8" in line and "MiB in bfloat16" in line
