"""Rounding alone never refuses a model at start."""

from pathlib import Path

import pytest
from corun.gpu.execution import assemble, start_probe
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import ModelError
from support.architectures import save_model
from support.bases import TEXT_MODELS, WRAPPERS
from support.executor_device import load_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

POPULAR = """
    llama qwen2 qwen3 mistral gemma2 gemma3_text phi3 mixtral qwen3_moe gpt_oss
""".split()
NUM_SEEDS_POPULAR, NUM_SEEDS = 20, 3
SOON = ("llama", "mixtral", "phimoe")  # without --full


def probed(directory: Path, dtype: str) -> assemble.LoadedModel:
    config = EngineConfig(model=str(directory), device="cpu", dtype=dtype)
    loaded = load_tiny(config)
    try:
        return start_probe.probe(loaded, config, max_threads=None)
    finally:
        loaded.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", SOON)
def test_rounding_does_not_refuse(model_type: str, dtype: str, tmp_path: Path) -> None:
    assert probed(save_model(model_type, tmp_path), dtype).max_step_tokens == 512


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # some of these models warn when they are made
@pytest.mark.parametrize("model_type", sorted({*TEXT_MODELS, *WRAPPERS}))
def test_what_is_served_in_float32_is_served_in_16_bits(model_type: str, tmp_path: Path) -> None:
    num_seeds = NUM_SEEDS_POPULAR if model_type in POPULAR else NUM_SEEDS
    try:
        probed(save_model(model_type, tmp_path / "first"), "float32")
    except ModelError as error:
        pytest.skip(f"not served: {error}")
    for seed in range(num_seeds):
        probed(save_model(model_type, tmp_path / str(seed), seed=seed), "bfloat16")
