"""Support is decided without weights: ``corun check`` and ``corun serve`` agree."""

from pathlib import Path

import pytest
import torch
import transformers
from corun.gpu.forward.batch import StepContext
from corun.gpu.model.attention_hook import PagedAttentionHook
from corun.gpu.model.load import load_model
from corun.gpu.model.probe import record_attention
from corun.gpu.model.quantization_plan import plan_quantization
from corun.gpu.model.skeleton import target_map_of, without_initial_values
from corun.gpu.model.source import ModelSource, load_config
from corun.gpu.model.targets import build_target_map, record_calls, with_calls
from corun.runtime.adapters.target_map import TargetMap
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import ModelError
from packaging.version import Version
from support.bases import TEXT_MODELS, WRAPPERS, auto_class, base_config

# Their refusals: parts of the message.
REFUSED = {
    "bloom": "never calls transformers' attention interface",
    "falcon": "does not use transformers' attention interface",
    "gpt_neo": "does not use transformers' attention interface",
    "xglm": "never calls transformers' attention interface",
    "rwkv": "never calls transformers' attention interface",
    "mpt": "fails on packed rows|never calls",
    "minimax": "linear_attention",
    "qwen3_5_text": "linear_attention",
    "qwen3_5": "linear_attention",
    "qwen3_next": "linear_attention",
    "nemotron_h": "linear_attention",
    "recurrent_gemma": "linear_attention",
    "mamba": "linear_attention",
    "bamba": "linear_attention",
    "lfm2": "conv",
    "lfm2_moe": "conv",
    "falcon_h1": "hybrid",
    "deepseek_v32": "indexed_attention",
    "diffllama": "more than once in a layer",
    "doge": "its own attention mask",
    "hrm_text": "list of its 16 decoder layers",
    "paligemma": "not causal",
    "mllama": "1 of 2 layers",
}
if Version(transformers.__version__) < Version("5.24"):
    REFUSED |= {
        "gptj": "does not use transformers' attention interface",
        "codegen": "never calls transformers' attention interface",
    }


READ_VALUES = {"jetmoe"}  # models whose modules read values, so they do not run without weights


def as_served(source: ModelSource) -> TargetMap:
    """Load the weights and run the model, as a start does."""
    hook = PagedAttentionHook(StepContext())
    try:
        model = load_model(source, load_config(source), torch.float32, torch.device("cpu"), hook.name)
        target_map = build_target_map(model)
        paths = [target.path for target in target_map.targets]
        calls = record_calls(model, paths, lambda: record_attention(model, hook))
        return with_calls(target_map, calls)
    finally:
        hook.close()


@pytest.mark.filterwarnings("ignore")  # some of these models warn when they are made
@pytest.mark.parametrize("model_type", [*TEXT_MODELS, *WRAPPERS])
def test_check_decides_as_serve(model_type: str, tmp_path: Path) -> None:
    config = base_config(model_type)
    auto_class(config).from_config(config).save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path))
    if model_type in REFUSED:
        for decide in (as_served, target_map_of):
            with pytest.raises(ModelError, match=REFUSED[model_type]):
                decide(source)
        return
    served, checked = as_served(source), target_map_of(source)
    if model_type in READ_VALUES:  # without weights, calls are unknown
        assert [one.path for one in served.targets] == [one.path for one in checked.targets]
    else:
        assert served.targets == checked.targets
    assert served.refused == checked.refused
    assert served.unused == checked.unused
    has_shared_kv = bool(getattr(config.get_text_config(), "num_kv_shared_layers", 0))
    assert bool(served.unused) == (model_type in WRAPPERS or has_shared_kv)
    assert served.vocabularies == checked.vocabularies


@pytest.mark.parametrize("method", ["hqq", "quanto", "exl3", "modelopt"])
def test_quantised_weights_that_are_not_read(method: str, tmp_path: Path) -> None:
    config = base_config("llama")
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path))
    with pytest.raises(ModelError) as at_check:
        target_map_of(source)
    with pytest.raises(ModelError) as at_start:
        plan_quantization(EngineConfig(), load_config(source), torch.device("cpu"))
    assert str(at_check.value) == str(at_start.value)
    assert f"quantised by '{method}'" in str(at_check.value)
    assert "serve the full model in safetensors" in str(at_check.value)


def test_initial_values_are_left_out_on_the_meta_device_alone() -> None:
    def build() -> torch.nn.Linear:
        linear = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(linear.weight)
        return linear

    assert without_initial_values(build).weight.tolist() == [[1.0, 1.0]] * 2
    with torch.device("meta"):
        assert without_initial_values(build).weight.is_meta


def test_ranges_are_on_the_meta_device_where_modules_combine_them_with_what_is_there() -> None:
    with torch.device("meta"):
        powers = without_initial_values(lambda: 2.0 ** torch.arange(3))
        assert powers.tolist() == [1, 2, 4]
        assert without_initial_values(lambda: torch.arange(3) + torch.ones(3)).is_meta
        with pytest.raises(RuntimeError, match="no such layer"):
            without_initial_values(_fails)


def _fails() -> None:
    raise RuntimeError("no such layer")
