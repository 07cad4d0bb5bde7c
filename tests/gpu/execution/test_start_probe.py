"""Rounding alone never refuses a model at start."""

import json
import os
from pathlib import Path

import pytest
from corun.gpu.execution import assemble, runner, start_probe
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


def test_a_passed_comparison_is_kept_until_something_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=start_probe.__name__)
    directory, kept = save_model("llama", tmp_path / "model"), tmp_path / "kept"

    def is_repeated(*, block_size: int = 16, linear: str = "plain") -> bool:
        config = EngineConfig(
            model=str(directory), device="cpu", dtype="float32", block_size=block_size, linear_backend=linear
        )
        loaded = load_tiny(config)
        caplog.clear()
        try:
            start_probe.probe(loaded, config, max_threads=None, kept=kept)
        finally:
            loaded.close()
        assert ("parity probe passed" in caplog.text) != ("parity probe: not repeated" in caplog.text)
        return "parity probe passed" in caplog.text

    assert is_repeated()
    assert not is_repeated()
    assert is_repeated(block_size=8)
    assert is_repeated(linear="onednn")
    (weights,) = directory.glob("*.safetensors")
    times = weights.stat()
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert is_repeated(), "it was written again, although size and time are the same"
    assert not is_repeated()
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 1e-3}))
    assert is_repeated()
    for file in kept.rglob("*.json"):
        file.write_text("damaged")
    assert is_repeated()


def test_a_failed_comparison_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(save_model("llama", tmp_path / "model")), device="cpu", dtype="float32")
    kept = tmp_path / "kept"
    forward = runner.ModelRunner.probe_step
    loaded = load_tiny(config)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(runner.ModelRunner, "probe_step", lambda *given: -forward(*given))
            with pytest.raises(ModelError, match="differ from plain"):
                start_probe.probe(loaded, config, max_threads=None, kept=kept)
        assert not list(kept.rglob("*.json"))
        start_probe.probe(loaded, config, max_threads=None, kept=kept)
    finally:
        loaded.close()


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
